"""The demo's data: what the tool makes of a small source, and what stands in the shipped files."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tools.demo import make_data
from tools.demo.make_data import Article, Question

SHIPPED = Path(__file__).parents[3] / "data" / "demo"
SIDES, MIXED = ("train", "test"), ("", "_mixed")
COLUMNS = [
    "id",
    "question",
    "golden_answers",
    "data_source",
    "prompt",
    "ability",
    "reward_model",
    "extra_info",
]


def article(title: str, description: str, extract: str = "", topic: str = "Arts") -> dict[str, str]:
    return {"title": title, "description": description, "extract": extract or f"{title} is known.", "topic": topic}


def person(title: str, description: str) -> dict[str, str]:
    return article(title, description, f"{title} lived. He worked.", "People")


SOURCE = [
    person("Ada Byron", "English mathematician (1815–1852)"),
    person("Karl Hofer", "German painter (born 1943)"),
    person("Old Greek", "Greek poet (c. 500–450 BC)"),
    person("Some King", "King of Somewhere (1520–1566)"),
    person("Two Reigns", "Duke (1500–1520) and king (1520–1560)"),
    article("Loud Four", "English rock band (1960–1999)", "Loud Four were a band. They played.", "People"),
    article("Long War", "War in Europe (1618–1648)", topic="History"),
    article("Silver Hill", "1908 film by Ada Byron"),
    article("Blue Door (painting)", "Painting by Karl Hofer"),
    article("Red Door", "1960 novel by Jan Smith and Ada Byron"),
    article("Green Door", "1960 film based on the book by Ada Byron"),
    article('The "Big" One', "1970 novel by Ben Stone"),
    article("Sea thing", "Index of animals", "Sea thing may refer to either: this or that"),
]


@pytest.fixture
def source() -> dict[str, dict[str, str]]:
    return {entry["title"]: entry for entry in SOURCE}


def questions_of(source: dict[str, dict[str, str]]) -> tuple[list[Question], Counter[str], list[Article]]:
    drops: Counter[str] = Counter()
    articles = make_data.clean(source, drops)
    return make_data.audit(make_data.make_questions(articles), articles, drops), drops, articles


def test_questions_of_a_small_source(source: dict[str, dict[str, str]]) -> None:
    questions, _, _ = questions_of(source)
    assert {(question.text, question.answers) for question in questions} >= {
        ("In what year was Ada Byron born?", ("1815",)),
        ("In what year did Ada Byron die?", ("1852",)),
        ("In what year was Karl Hofer born?", ("1943",)),
        ("Who directed the film Silver Hill?", ("Ada Byron",)),
        ("From what year is the film Silver Hill?", ("1908",)),
        ("Who made the painting Blue Door?", ("Karl Hofer",)),
        ("In what year did the person who directed the film Silver Hill die?", ("1852",)),
    }


def test_no_question_about_reigns_bands_wars_eras_or_several_makers(source: dict[str, dict[str, str]]) -> None:
    questions, _, _ = questions_of(source)
    asked = " ".join(question.text for question in questions)
    for name in ("Old Greek", "Some King", "Two Reigns", "Loud Four", "Long War", "Red Door", "Green Door"):
        assert name not in asked


def test_a_two_hop_answer_stands_only_in_the_second_article(source: dict[str, dict[str, str]]) -> None:
    source["Silver Hill"]["extract"] = "Its director was born in 1815."
    questions, drops, _ = questions_of(source)
    two_hop = [question.answers for question in questions if question.source == "demo_two_hop"]
    assert ("1815",) not in two_hop
    assert ("1852",) in two_hop
    assert drops["demo_two_hop: one search is enough"] == 1


def test_the_audit_drops_and_counts_ambiguous_names(source: dict[str, dict[str, str]]) -> None:
    source["Ada Byron (film)"] = article("Ada Byron (film)", "1999 film by Karl Hofer")
    questions, drops, _ = questions_of(source)
    assert not [question for question in questions if question.titles[0] == "Ada Byron"]
    assert drops["demo_birth_year: ambiguous name"] == 1


def test_titles_with_quotes_keep_the_retrieval_format(source: dict[str, dict[str, str]]) -> None:
    _, drops, articles = questions_of(source)
    contents = next(article.contents for article in articles if "Big" in article.title)
    assert contents.split("\n") == ["\"The 'Big' One\"", '1970 novel by Ben Stone. The "Big" One is known.']
    assert drops["article: disambiguation"] == 1


def test_the_same_source_makes_the_same_bytes(source: dict[str, dict[str, str]], tmp_path: Path) -> None:
    path = tmp_path / "source.json.gz"
    path.write_bytes(gzip.compress(json.dumps(source).encode()))
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        make_data.make(path, folder)
    for name in ("corpus.jsonl.gz", *(f"{side}{mixed}.parquet" for side in SIDES for mixed in MIXED), "README.md"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_a_source_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "source.json"
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        make_data.read_source(path)


@pytest.fixture(scope="module")
def passages() -> dict[str, str]:
    with gzip.open(SHIPPED / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert [row["id"] for row in rows] == [str(index) for index in range(len(rows))]
    return {row["contents"].split("\n", 1)[0][1:-1]: row["contents"].split("\n", 1)[1] for row in rows}


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[dict]]:
    return {side: pq.read_table(SHIPPED / f"{side}.parquet").to_pylist() for side in ("train", "test")}


def test_shipped_rows_have_the_public_sets_columns(shipped: dict[str, list[dict]]) -> None:
    assert len(shipped["test"]) >= 300
    assert sum(row["data_source"] == "demo_two_hop" for row in shipped["test"]) >= 40
    for side, rows in shipped.items():
        for index, row in enumerate(rows):
            assert list(row) == COLUMNS
            assert row["reward_model"] == {"ground_truth": {"target": row["golden_answers"]}, "style": "rule"}
            assert row["extra_info"] == {"index": index, "split": side}
            assert row["prompt"] == [{"role": "user", "content": make_data.INSTRUCTION + row["question"]}]


def test_shipped_mixed_files_hold_the_same_rows_with_two_hop_questions_spread(shipped: dict[str, list[dict]]) -> None:
    mixed = {side: pq.read_table(SHIPPED / f"{side}_mixed.parquet").to_pylist() for side in SIDES}
    two_hop = {side: [row["data_source"] == "demo_two_hop" for row in rows] for side, rows in mixed.items()}
    for side in SIDES:
        by_id = {row["id"]: row for row in shipped[side]}
        assert all(row == by_id[row["id"]] for row in mixed[side])
        assert {row["id"] for row in mixed[side]} == set(by_id)
    assert all(sum(two_hop["train"][start : start + 8]) == 2 for start in range(0, len(mixed["train"]) - 8, 8))
    one_hop = [row["id"] for row in mixed["train"] if row["data_source"] != "demo_two_hop"]
    assert len(one_hop) == len(set(one_hop))
    assert len(mixed["test"]) == len(shipped["test"])
    assert all(sum(two_hop["test"][:first]) == pytest.approx(first * 43 / 200, abs=1) for first in (16, 100, 200))


def test_data_without_two_hop_questions_mixes_nothing() -> None:
    rows = [{"data_source": "demo_creator", "id": i} for i in range(3)]
    assert make_data.mix(rows, repeat=True) == make_data.mix(rows, repeat=False) == rows


def test_shipped_test_questions_are_kept_apart_from_training(shipped: dict[str, list[dict]]) -> None:
    def subjects(side: str) -> set[str]:
        kinds = "was|did|" + "|".join(make_data.VERB_OF_KIND)
        pattern = rf"(?:{kinds}) (?!the person|the {kinds})(.*?)(?: born| die)?\?$"
        return {match[1] for row in shipped[side] if (match := re.search(pattern, row["question"]))}

    makers = {
        side: {answer for row in rows if row["data_source"] == "demo_creator" for answer in row["golden_answers"]}
        for side, rows in shipped.items()
    }
    assert len(subjects("test")) > 150
    assert not subjects("train") & subjects("test")
    assert not makers["train"] & makers["test"]
    assert not makers["train"] & subjects("test")
    assert not makers["test"] & subjects("train")


def test_shipped_answers_stand_in_the_shipped_passages(
    shipped: dict[str, list[dict]], passages: dict[str, str]
) -> None:
    texts = list(passages.values())
    for row in shipped["test"]:
        if row["data_source"] == "demo_birth_year":
            name = row["question"].removeprefix("In what year was ").removesuffix(" born?")
            matches = [text for title, text in passages.items() if re.sub(r" \([^)]*\)$", "", title) == name]
            assert len(matches) == 1
            assert row["golden_answers"][0] in " ".join(matches[0].split()[: make_data.VISIBLE_WORDS])
        assert any(row["golden_answers"][0] in text for text in texts)
