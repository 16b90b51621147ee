"""Data files from public sets, in tiny copies of their real shapes, and from files of a user's own, good and bad."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from sleuth.arguments import parse_args
from sleuth.data import load_rows
from sleuth.prompt_templates import TEMPLATES
from tests.hub import serve_hub
from tests.tiny_models import make_byte_bpe_tokenizer
from tools.prepare_data import main
from tools.qa_data import public
from tools.qa_data.rows import question_key

DEMO = Path(__file__).resolve().parents[2] / "data/demo"
FACTS = {"title": ["Rhine", "Basel"], "sent_id": [0, 1]}
METADATA: dict[str, dict[str, Any] | None] = {  # as the files of FlashRAG's collection have it
    "nq": None,
    "triviaqa": None,
    "popqa": {"subj": "Rhine", "prop": "mouth", "obj": "North Sea", "s_aliases": '["Rhein"]', "s_pop": 10},
    "hotpotqa": {
        "type": "bridge",
        "level": "hard",
        "supporting_facts": FACTS,
        "context": {"title": ["Rhine"], "sentences": [["It flows.", " To the sea."]]},
    },
    "2wikimultihopqa": {
        "type": "compositional",
        "supporting_facts": FACTS,
        "context": {"title": ["Rhine"], "content": [["It flows."]]},
        "evidences": {"fact": ["Rhine"], "relation": ["mouth"], "entity": ["North Sea"]},
    },
    "musique": {
        "answerable": True,
        "question_decomposition": [
            {"id": 7, "question": "Rhine >> mouth", "answer": "North Sea", "support_paragraph": {"title": "Rhine"}}
        ],
    },
    "bamboogle": {},
}


def lines(name: str, split: str, count: int = 3) -> bytes:
    """Rows of a public set; every second question has no question mark, as NQ's."""
    rows = []
    for i in range(count):
        row = {"id": f"{split}_{i}", "question": f"what is fact {i} of {name} in {split}" + "?" * (i % 2)}
        row |= {"golden_answers": [f"{name} {i}", f"the {name} {i}"][: 1 + i % 2]}
        rows.append(row if METADATA[name] is None else {**row, "metadata": METADATA[name]})
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def collection(count: int = 3) -> dict[str, bytes]:
    files = {}
    for name, found in public.SETS.items():
        for split in ("train", "dev", "test"):
            if found.rows(split):
                files[f"{name}/{split}.jsonl"] = lines(name, split, count)
    return files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with tiny copies of the seven sets."""
    for file, content in collection().items():
        path = tmp_path / "flashrag" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "flashrag"


def run(folder: Path, *flags: object) -> int:
    return main(["--local_dir", str(folder), *map(str, flags)])


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / f"{name}.parquet").to_pylist()
    return rows


def test_public_sets_in_the_shape_of_search_r1(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "out", "--source", source) == 0
    train, test, dev = (rows_of(tmp_path / "out", name) for name in ("train", "test", "dev"))
    assert [row["data_source"] for row in train] == ["nq"] * 3 + ["hotpotqa"] * 3
    assert [row["data_source"] for row in test] == [name for name in public.TEST_SETS for _ in range(3)]
    assert [row["id"] for row in test[:3]] == ["test_0", "test_1", "test_2"]
    assert test[9]["question"] == "what is fact 0 of hotpotqa in dev?"  # it has no public test set
    assert train[1]["reward_model"] == {"ground_truth": {"target": ["nq 1", "the nq 1"]}, "style": "rule"}
    assert train[1]["golden_answers"] == ["nq 1", "the nq 1"]
    instruction = TEMPLATES["tags"].replace("{question}", "what is fact 0 of nq in train?")
    assert train[0]["prompt"] == [{"role": "user", "content": instruction}]
    assert train[5]["extra_info"] == {"index": 2, "split": "train"}
    assert len(dev) == 21
    assert all(row in [{**other, "extra_info": row["extra_info"]} for other in test] for row in dev)
    said = capsys.readouterr().out
    assert "train.parquet: 6 rows (nq 3, hotpotqa 3)" in said
    assert "nq/train.jsonl: 3 rows, where FlashRAG's table states 79,168" in said


def test_the_defaults_are_the_published_counts() -> None:
    assert sum(public.SETS[name].train for name in public.TRAIN_SETS) == 169_615
    assert sum(max(found.test, 0) or found.dev for found in public.SETS.values()) == 51_713


def test_the_shape_is_that_of_the_demos_data(source: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--source", source)
    demo, made = (pq.read_schema(path / "train.parquet") for path in (DEMO, tmp_path / "out"))
    assert {name: demo.field(name).type for name in demo.names} == {name: made.field(name).type for name in made.names}


def test_what_is_made_is_what_a_run_reads(source: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--source", source, "--data_sources", "nq", "--protocol", "tools")
    path = str(tmp_path / "out/train.parquet")
    flags = "--hf-checkpoint m --colocate --custom-rm-path a.b --rollout-max-context-len 4096 --apply-chat-template"
    rows = load_rows(path, parse_args([*flags.split(), "--prompt-data", path]), make_byte_bpe_tokenizer())
    assert [row.metadata for row in rows] == [{"data_source": "nq"}] * 3
    assert [message["role"] for message in rows[0].prompt] == ["system", "user"]  # type: ignore[index]
    assert rows[0].label == {"ground_truth": {"target": ["nq 0"]}, "style": "rule"}


def test_the_dev_set_is_small_spread_and_always_the_same(source: Path, tmp_path: Path) -> None:
    for file in source.rglob("*.jsonl"):
        file.write_bytes(lines(file.parent.name, file.stem, 50))
    for out in ("a", "b"):
        run(tmp_path / out, "--source", source, "--dev-rows", 10)
    dev = rows_of(tmp_path / "a", "dev")
    assert dev == rows_of(tmp_path / "b", "dev")
    assert len(dev) == 70
    places = [row["extra_info"]["index"] for row in dev if row["data_source"] == "nq"]
    assert places == sorted(places)
    assert max(places) > 25 > min(places)


def test_sets_come_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    flags = ("--data_sources", "nq,hotpotqa", "--test_sources", "nq,bamboogle")
    with serve_hub({f"{public.REPOSITORY}/{file}": content for file, content in collection().items()}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert run(tmp_path / "out", *flags) == 0
        assert [file.removeprefix(public.REPOSITORY + "/") for file, _ in hub.gets] == [
            "nq/train.jsonl",
            "hotpotqa/train.jsonl",
            "nq/test.jsonl",
            "bamboogle/test.jsonl",
        ]
        assert "downloading nq/train.jsonl" in capsys.readouterr().err
        del hub.files[f"{public.REPOSITORY}/popqa/test.jsonl"]
        assert run(tmp_path / "out", "--test_sources", "popqa") == 1
        assert "hf download RUC-NLPIR/FlashRAG_datasets popqa/test.jsonl" in capsys.readouterr().err
    assert len(rows_of(tmp_path / "out", "train")) == 6  # what was there is left as it was


def own(path: Path, rows: list[list[str]], delimiter: str = ",", encoding: str = "utf-8") -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def answers(folder: Path, name: str = "train") -> list[list[str]]:
    return [row["golden_answers"] for row in rows_of(folder, name)]


@pytest.mark.parametrize(("delimiter", "suffix"), [(",", ".csv"), ("\t", ".tsv")])
def test_commas_quotes_and_line_breaks_in_a_table(tmp_path: Path, delimiter: str, suffix: str) -> None:
    table = [["q", "a"], ["Where?", "Paris, France"], ["Who,\nthen?", 'He said "no"'], ["Which?", '["a", "b"]']]
    path = own(tmp_path / f"mine{suffix}", table, delimiter)
    columns = ("--question-column", "q", "--answers-column", "a")
    assert run(tmp_path, "--train", path, "--test", path, *columns) == 0
    assert answers(tmp_path) == [["Paris, France"], ['He said "no"'], ["a", "b"]]
    assert [row["question"] for row in rows_of(tmp_path, "train")] == ["Where?", "Who, then?", "Which?"]
    assert rows_of(tmp_path, "test")[0]["data_source"] == "mine"
    assert run(tmp_path, "--train", path, "--test", path, *columns, "--answers-separator", ",") == 0
    assert answers(tmp_path)[0] == ["Paris", "France"]


def test_byte_order_marks_and_other_encodings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = [["question", "golden_answers"], ["Où?", "Orléans"], ["Who?", "Zoë – maybe"]]
    marked, windows = (
        own(tmp_path / "a.csv", table, encoding="utf-8-sig"),
        own(tmp_path / "b.csv", table, ",", "cp1252"),
    )
    assert run(tmp_path, "--train", marked, "--test", marked) == 0
    assert answers(tmp_path) == [["Orléans"], ["Zoë – maybe"]]
    assert run(tmp_path, "--train", windows, "--test", marked) == 1
    assert "in utf-8, found the byte 0xf9" in (said := capsys.readouterr().err)
    assert "--encoding cp1252" in said
    assert run(tmp_path, "--train", windows, "--test", windows, "--encoding", "cp1252") == 0
    assert answers(tmp_path) == [["Orléans"], ["Zoë – maybe"]]
    wide = own(tmp_path / "c.tsv", table, "\t", "utf-16")
    capsys.readouterr()
    assert run(tmp_path, "--train", wide, "--test", wide) == 1
    assert "add --encoding utf-16" in capsys.readouterr().err
    assert run(tmp_path, "--train", wide, "--test", wide, "--encoding", "utf-16") == 0
    assert answers(tmp_path) == [["Orléans"], ["Zoë – maybe"]]
    assert run(tmp_path, "--train", marked, "--test", windows, "--encoding", "ascii") == 1
    assert "in ascii, found the byte" in (said := capsys.readouterr().err)
    assert "cp1252" not in said


def test_a_file_is_named_as_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own(tmp_path / "m.csv", [["question", "golden_answers"], ["a?", "1"], ["b?", "2"], ["c?", ""]])
    assert run(tmp_path / "out", "--train", Path("m.csv")) == 0
    assert "  m.csv: 1 without an answer" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own(tmp_path / "m.csv", [["question", "golden_answers"], ["a?", "1"], ["b?", "2"]])
    assert run(path, "--train", path) == 1
    assert "--local_dir: expected a folder that can be written, found " in capsys.readouterr().err


def test_other_files_and_shapes_of_answers(tmp_path: Path) -> None:
    rows = [
        {"question": "one?", "golden_answers": "1", "data_source": "mine/a"},
        {"question": "two?", "golden_answers": ["2", "II"]},
        {"question": "three?", "golden_answers": {"text": ["3"], "answer_start": [0]}},
    ]
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    table = tmp_path / "b.parquet"
    pd.DataFrame({"question": ["four?", "five?"], "golden_answers": [["4"], ["5", "V"]]}).to_parquet(table)
    assert run(tmp_path, "--train", packed, table, "--test", table, "--protocol", "none", "--name", "n") == 0
    assert answers(tmp_path) == [["1"], ["2", "II"], ["3"], ["4"], ["5", "V"]]
    made = rows_of(tmp_path, "train")
    assert [row["data_source"] for row in made] == ["mine/a", "n", "n", "n", "n"]
    assert made[0]["prompt"] == [{"role": "user", "content": "one?"}]


def test_rows_that_cannot_be_used_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = [
        ["question", "golden_answers"],
        ["a?", "1"],
        ["", "2"],
        ["b?", ""],
        ["c?", " "],
        ["d?", "[]"],
        ["A ?", "1"],
    ]
    table += [[f"q{i}?", ""] for i in range(5)]
    path, other = own(tmp_path / "m.csv", table), own(tmp_path / "t.csv", [table[0], ["a?", "1"], ["z?", "9"]])
    assert run(tmp_path / "out", "--train", path, "--test", other) == 0
    said = capsys.readouterr().out
    assert "m.csv: 1 without a question, left out (row 1)" in said
    assert "m.csv: 8 without an answer, left out (rows 2, 3, 4, 6, 7, ...)" in said
    assert "m.csv: 2 asked in the test set, too (rows 0, 5)" in said
    assert len(rows_of(tmp_path / "out", "train")) == 2
    third = own(tmp_path / "u.csv", [table[0], ["u?", "1"]])
    assert run(tmp_path / "out", "--train", path, other, "--test", third) == 0
    assert "t.csv: 1 asked before (row 0)" in capsys.readouterr().out
    run(tmp_path / "out", "--train", path, other, "--test", third, "--drop-duplicates")
    assert [row["question"] for row in rows_of(tmp_path / "out", "train")] == ["a?", "z?"]


def test_rows_are_held_out_and_equal_questions_stay_together(tmp_path: Path) -> None:
    table = [["question", "golden_answers"], *([f"number {i % 40}?", str(i)] for i in range(80))]
    assert run(tmp_path, "--train", own(tmp_path / "mine.csv", table)) == 0
    train, test = rows_of(tmp_path, "train"), rows_of(tmp_path, "test")
    assert (len(train), len(test)) == (72, 8)
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    first = [row["question"] for row in test]
    run(tmp_path, "--train", own(tmp_path / "mine.csv", [table[0], *table[:0:-1]]))
    assert sorted(first) == sorted(row["question"] for row in rows_of(tmp_path, "test"))


def test_questions_that_differ_in_case_and_marks_are_the_same() -> None:
    assert question_key("Who  wrote\tit?") == question_key("who wrote it") == question_key("Who wrote it ?")
    assert question_key("Who wrote it?") != question_key("Who wrote that?")


def bad_parquet(path: Path) -> Path:
    pd.DataFrame({"question": [], "golden_answers": []}).to_parquet(path)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: bad_parquet(f / "a.parquet"), "a.parquet has no rows"),
        (lambda f: own(f / "a.csv", []), "a.csv has no rows"),
        (lambda f: own(f / "a.csv", [["question", "golden_answers"]]), "a.csv has no rows"),
        (lambda f: own(f / "a.csv", [["q", "golden_answers"], ["a", "b"]]), "found q, golden_answers; name another"),
        (lambda f: own(f / "a.csv", [["question", "question"], ["a", "b"]]), "found 'question' twice"),
        (
            lambda f: own(f / "a.csv", [["question", "golden_answers"], ["Where?", "Paris", " France"]]),
            "line 2 of {0} has 3 fields, expected the 2 of the first; put a field that holds ',' in quotes",
        ),
        (lambda f: own(f / "a.xlsx", [["a"]]), "expected a file that ends in .parquet, .jsonl"),
        (lambda f: f / "none.csv", "expected a file at {0}, found none"),
        (lambda f: own(f / "a.csv", [["question", "golden_answers"], ["a", ""]]), "at least 2 different questions"),
        (lambda f: own(f / "a.jsonl", [["{}"]]), "expected a column 'question' (--question-column)"),
        (lambda f: own(f / "a.jsonl", [["x"]]), "line 1 of {0} is not JSON"),
    ],
)
def test_bad_files_are_told_and_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    path = make(tmp_path)
    assert run(tmp_path / "out", "--train", path) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message.format(path) in said
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data_sources", "popqa"], "--data_sources: expected names among nq, triviaqa, hotpotqa"),
        (["--data_sources", "nq,nq"], "expected each set once"),
        (["--test_sources", ","], "--test_sources: expected names among"),
    ],
)
def test_names_of_sets_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert run(tmp_path, *flags) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--answers-column", "a"], "--answers-column is for files of your own"),
        (["--train", "a.csv", "--data_sources", "nq"], "found both; drop one"),
        (["--dev-rows", "1000"], "--dev-rows: expected 0 to 100"),
    ],
)
def test_flags_that_do_not_fit_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *flags)
    assert message in capsys.readouterr().err


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Search, then answer briefly. Question: {question}\n")
    path = own(tmp_path / "a.csv", [["question", "golden_answers"], ["Who?", "Ann"]])
    run(tmp_path, "--train", path, "--test", path, "--prompt-template", tmp_path / "t.txt")
    content = "Search, then answer briefly. Question: Who?"
    assert rows_of(tmp_path, "train")[0]["prompt"] == [{"role": "user", "content": content}]
