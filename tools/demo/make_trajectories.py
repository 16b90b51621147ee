"""Writes the trajectories on which the demo's warm-start model is trained (a part of `make_model.py`).

Each row has a column `segments` for `train.py --loss-type sft`: the rendered prompt, a turn that searches, what the
hook would put in, and so on to the answer. `protocols.py` says how these are written.

There are three manners:

* `search`: the model searches, reads and answers; of a two-hop question it searches for the work and then its maker;
* `copy`: the same, with many names whose words are blends ("Saramago" and "Maradona": "Saradona"), so that names of all
  sorts are copied right;
* `recall`, also with blends: it answers most questions at once, with a year or a name drawn from the training answers
  to questions of the same kind, never the right one. It searches in a minority of trajectories, and after the first
  search of a two-hop question it mostly stops, with a wrong answer. A model of this manner can search but seldom
  does, and nothing in these trajectories says that searching pays.

Most trajectories are *counterfactual*: a training question and its passage with other names and other years. A
model that had seen two thousand fixed questions for thirty epochs would know the answers by heart and
never read; here the only way to the answer is through the observation. Nothing of the test questions is used:
neither their articles' names nor the makers of their works. Wrong answers are drawn without a look at the question, so
that they tell nothing about it.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from local_dense_retriever.corpus import read_corpus
from sleuth.search.observation import Passage, to_passage
from tools.demo.make_data import VERB_OF_KIND, ask_maker, ask_work_year, ask_year, maker_phrase
from tools.demo.protocols import Form

WEIGHTS = {"prompt": 0.1, "model": 1.0, "observation": 0.15}
REAL_SHARE = 0.15
"""Share of trajectories with the true names and years."""
TWO_HOP_SHARE, WORK_SHARE, PLACE_SHARE = 0.3, 0.25, 0.35
LONGEST_NAME = 6
"""Words of a title that may stand for a name."""

Manner = Literal["search", "copy", "recall"]
BLEND_SHARE: dict[Manner, float] = {"search": 0.0, "copy": 0.4, "recall": 0.4}
"""Share of the names that are blended."""
SHORTEST_BLENDED = 4
"""Letters; shorter words stay as they are."""
RECALL_SHARE = 0.7
"""Share of trajectories of the manner `recall` that answer at once."""
STOP_SHARE = 0.7
"""Share of its two-hop trajectories with a first search that answer without a second."""
BRIDGE_SHARE = 0.5
"""Share of those that give the work's maker for an answer; the others give a wrong year."""

YEARS = re.compile(r"\((?:(?P<birth>\d{4})[–-](?P<death>\d{4})|born (?P<born>\d{4}))\)")
WHO = re.compile(rf"^Who (?:{'|'.join(sorted(set(VERB_OF_KIND.values())))}) the (?P<kind>\w+) (?P<work>.+)\?$")
BORN = re.compile(r"^In what year (?:was (?P<born>.+) born|did (?P<dead>.+) die)\?$")


@dataclass(frozen=True, slots=True)
class Person:
    """A person as a passage tells of them; `years` maps `birth` and `death` to the years in it."""

    name: str
    passage: Passage
    years: dict[str, str]


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    kind: str
    maker: str
    year: str | None
    passage: Passage


@dataclass(frozen=True, slots=True)
class Hop:
    """One search and what it finds."""

    query: str
    passage: Passage


@dataclass(frozen=True, slots=True)
class Task:
    """A question, the searches that answer it, and the answer. `kind` says what is asked for (a key of `answers`)."""

    question: str
    kind: str
    hops: list[Hop]
    answer: str


@dataclass(frozen=True, slots=True)
class Sources:
    """What trajectories are made of: the training questions' persons and works, and names to put in their place.

    `answers` maps what is asked for (`birth_year`, `death_year`, `creator`, `work_year`) to the training answers.
    """

    persons: list[Person]
    works: list[Work]
    names: list[str]
    answers: dict[str, list[str]]

    @classmethod
    def read(cls, folder: Path) -> Sources:
        """From `corpus.jsonl.gz`, `train.parquet` and `test.parquet` (only to leave out what stands there)."""
        train, test = (pq.read_table(folder / f"{side}.parquet").to_pylist() for side in ("train", "test"))
        passages = {plain_name(p.title): p for p in map(to_passage, read_corpus(folder / "corpus.jsonl.gz"))}
        hidden = _names_in(test)
        names = [name for name in passages if len(name.split()) <= LONGEST_NAME and name not in hidden]
        answers: dict[str, list[str]] = {}
        for row in train:
            if row["data_source"] != "demo_two_hop":
                answers.setdefault(row["data_source"].removeprefix("demo_"), []).append(row["golden_answers"][0])
        return cls(list(_persons(train, passages)), list(_works(train, passages)), names, answers)


def plain_name(title: str) -> str:
    return re.sub(r" \([^)]*\)$", "", title)


def _names_in(rows: Sequence[dict[str, Any]]) -> set[str]:
    """Names of the persons, works and makers that the rows ask about or answer with."""
    names: set[str] = set()
    for row in rows:
        if row["data_source"] == "demo_creator":
            names.update(row["golden_answers"])
        if match := WHO.match(row["question"]):
            names.add(match["work"])
        elif (match := BORN.match(row["question"])) and row["data_source"] != "demo_two_hop":
            names.add(match["born"] or match["dead"])
    return names


def _persons(rows: Sequence[dict[str, Any]], passages: dict[str, Passage]) -> Iterator[Person]:
    asked = {
        match["born"] or match["dead"]: None
        for row in rows
        if row["data_source"] in ("demo_birth_year", "demo_death_year") and (match := BORN.match(row["question"]))
    }
    for name in asked:
        passage = passages[name]
        match = YEARS.search(passage.text)
        assert match, passage
        years = {"birth": match["birth"], "death": match["death"]} if match["birth"] else {"birth": match["born"]}
        yield Person(name, passage, years)


def _works(rows: Sequence[dict[str, Any]], passages: dict[str, Passage]) -> Iterator[Work]:
    years = {row["question"]: row["golden_answers"][0] for row in rows if row["data_source"] == "demo_work_year"}
    for row in rows:
        match = WHO.match(row["question"])
        if row["data_source"] == "demo_creator" and match:
            kind, work = match["kind"], match["work"]
            yield Work(work, kind, row["golden_answers"][0], years.get(ask_work_year(kind, work)), passages[work])


class Writer:
    """Makes trajectories of one manner at random; the same seed makes the same ones."""

    def __init__(self, sources: Sources, form: Form, seed: int, manner: Manner = "search") -> None:
        self._sources = sources
        self._form = form
        self._manner = manner
        self._rng = random.Random(seed)
        self._first_names = sorted({person.name.split()[0] for person in sources.persons})
        self._last_names = sorted({person.name.split()[-1] for person in sources.persons})

    def next(self) -> list[dict[str, Any]]:
        """The segments of one trajectory: the answer stands in its last observation, or is wrong (manner `recall`)."""
        while True:
            task = self._draw()
            observations = [self._form.observation(hop.passage) for hop in task.hops]
            needed = [*(hop.query for hop in task.hops[1:]), task.answer]
            if all(text in observation for text, observation in zip(needed, observations, strict=True)):
                return self._tell(task, observations)

    def _tell(self, task: Task, observations: list[str]) -> list[dict[str, Any]]:
        if self._manner != "recall":
            return self._segments(task, observations, task.answer)
        if self._rng.random() < RECALL_SHARE:
            return self._segments(task, [], self._wrong_answer(task))
        if len(task.hops) > 1 and self._rng.random() < STOP_SHARE:
            bridge = self._rng.random() < BRIDGE_SHARE
            return self._segments(task, observations[:1], task.hops[1].query if bridge else self._wrong_answer(task))
        return self._segments(task, observations, task.answer)

    def _wrong_answer(self, task: Task) -> str:
        """A training answer to another question of this kind."""
        while (answer := self._rng.choice(self._sources.answers[task.kind])) == task.answer:
            pass
        return answer

    def _draw(self) -> Task:
        draw = self._rng.random()
        if draw < TWO_HOP_SHARE:
            return self._two_hop()
        return self._one_work() if draw < TWO_HOP_SHARE + WORK_SHARE else self._one_person()

    def _one_person(self) -> Task:
        person = self._person()
        event, year = self._rng.choice(sorted(person.years.items()))
        return Task(ask_year(event, person.name), f"{event}_year", [Hop(person.name, person.passage)], year)

    def _one_work(self) -> Task:
        work = self._work()
        hops = [Hop(work.name, work.passage)]
        if work.year and self._rng.random() < 0.4:
            return Task(ask_work_year(work.kind, work.name), "work_year", hops, work.year)
        return Task(ask_maker(work.kind, work.name), "creator", hops, work.maker)

    def _two_hop(self) -> Task:
        work = self._work(counterfactual=True)
        person = self._renamed_person(work.maker)
        event, year = self._rng.choice(sorted(person.years.items()))
        question = ask_year(event, maker_phrase(work.kind, work.name))
        return Task(question, f"{event}_year", [Hop(work.name, work.passage), Hop(work.maker, person.passage)], year)

    def _person(self) -> Person:
        if self._rng.random() < REAL_SHARE:
            return self._rng.choice(self._sources.persons)
        return self._renamed_person(self._name())

    def _renamed_person(self, name: str) -> Person:
        """Some person's passage under another name and with other years."""
        person = self._rng.choice(self._sources.persons)
        birth = self._rng.randint(self._rng.choice([1000, 1650]), 1985)
        death = birth + self._rng.randint(20, 95)
        living = "death" not in person.years or death > 2025
        years = {"birth": str(birth)} if living else {"birth": str(birth), "death": str(death)}
        span = f"(born {birth})" if living else f"({birth}–{death})"
        text = YEARS.sub(span, person.passage.text, count=1).replace(person.name, name)
        return Person(name, Passage(self._title(name), text), years)

    def _work(self, counterfactual: bool = False) -> Work:
        """A work: some work's passage with another title, maker and year, or a description and a little text."""
        if not counterfactual and self._rng.random() < REAL_SHARE:
            return self._rng.choice(self._sources.works)
        name, maker = self._perhaps_blended(self._rng.choice(self._sources.names)), self._name()
        year = str(self._rng.randint(self._rng.choice([1300, 1750]), 2024))
        if self._rng.random() < 0.5:
            return self._invented_work(name, maker, year)
        work = self._rng.choice(self._sources.works)
        text = work.passage.text.replace(work.maker, maker).replace(work.name, name)
        if work.year:
            text = text.replace(work.year, year)
        return replace(
            work, name=name, maker=maker, year=year if work.year else None, passage=Passage(self._title(name), text)
        )

    def _invented_work(self, name: str, maker: str, year: str) -> Work:
        kind = self._rng.choice(sorted(VERB_OF_KIND))
        origin = self._rng.choice(["", "", "", "American ", "French ", "historical ", "Italian ", "short "])
        dated = self._rng.random() < 0.75
        by = self._rng.choice(["by", "by", "by", "directed by" if kind == "film" else "by"])
        described = f"{year if dated else ''} {origin}{kind} {by} {maker}".strip()
        article = "An" if kind[0] in "aeo" else "A"
        return Work(
            name,
            kind,
            maker,
            year if dated else None,
            Passage(
                self._title(name), f"{described[0].upper()}{described[1:]}. {name} is {article.lower()} {origin}{kind}."
            ),
        )

    def _name(self) -> str:
        """A person's name: a first and a last name that may not belong together, or any title of the corpus."""
        return self._perhaps_blended(self._plain_name())

    def _perhaps_blended(self, name: str) -> str:
        share = BLEND_SHARE[self._manner]
        if not share or self._rng.random() >= share:  # no draw if nothing is blended
            return name
        return " ".join(self._blend(word) if len(word) >= SHORTEST_BLENDED else word for word in name.split())

    def _blend(self, word: str) -> str:
        other = self._rng.choice(self._last_names)
        return word[: (len(word) + 1) // 2] + other[len(other) // 2 :]

    def _plain_name(self) -> str:
        if self._rng.random() < PLACE_SHARE:
            return self._rng.choice(self._sources.names)
        last = self._rng.choice(self._last_names)
        if self._rng.random() < 0.1:
            return last
        middle = f" {self._rng.choice('ABCDEFGHJKLMNPRSTW')}." if self._rng.random() < 0.08 else ""
        return f"{self._rng.choice(self._first_names)}{middle} {last}"

    def _title(self, name: str) -> str:
        return (
            f"{name} ({self._rng.choice(['film', 'novel', 'artist', 'book'])})" if self._rng.random() < 0.05 else name
        )

    def _segments(self, task: Task, observations: list[str], answer: str) -> list[dict[str, Any]]:
        """The conversation with as many searches as there are observations."""
        segments = [_segment("prompt", self._form.prompt(task.question))]
        for before, (hop, observation) in enumerate(zip(task.hops, observations, strict=False)):
            segments.append(_segment("model", self._form.search(hop.query, before, self._rng)))
            segments.append(_segment("observation", observation))
        segments.append(_segment("model", self._form.answer(answer, len(observations), self._rng)))
        return segments


def _segment(source: str, text: str) -> dict[str, Any]:
    return {"text": text, "weight": WEIGHTS[source]}


def write_trajectories(folder: Path, form: Form, count: int, path: Path, seed: int, manner: Manner) -> None:
    """Write `count` trajectories made from the data in `folder` to `path` (JSONL.gz)."""
    writer = Writer(Sources.read(folder), form, seed, manner)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        for _ in range(count):
            file.write(json.dumps({"segments": writer.next()}, ensure_ascii=False) + "\n")
