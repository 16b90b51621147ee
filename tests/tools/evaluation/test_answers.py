"""The file of answers: what is written is read again, whatever cut it short; other evaluations' files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sleuth.metrics.rollout_metrics import evaluation_values
from sleuth.metrics.trajectories import read_trajectories
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace
from tests.metrics.samples import make_sample, word_tokenizer
from tools.evaluation.answers import AnswerFile, Evaluation, whole_length

SETTINGS = {"model": {"name": "a"}, "sampling": {"seed": 1}}


def opened(path: Path, settings: dict[str, Any] = SETTINGS, samples: int = 1) -> AnswerFile:
    return AnswerFile(path, settings, word_tokenizer(), samples)


def answer(group: int, sample: int = 0, samples: int = 1, **more: Any) -> Sample:
    done = make_sample(group * samples + sample, group, source="nq", reported={"searches": 1.0}, **more)
    done.file, done.row = "test.parquet", group
    return done


def new(group: int, sample: int = 0, samples: int = 1) -> Sample:
    return Sample(group * samples + sample, group, "who wrote it", TokenTrace([1, 2, 3]), label="Ann")


def test_answers_are_found_again(tmp_path: Path) -> None:
    with opened(tmp_path / "a.jsonl", samples=2) as file:
        for group, sample in ((1, 1), (0, 0)):
            file.add("demo", 0.0, answer(group, sample, 2, components={"exact_match": 1.0}))
    with opened(tmp_path / "a.jsonl", samples=2) as file:
        assert file.finished == 2
        answers = file.of("demo", 0.0)
        found = answers.take(new(1, 1, 2))
        assert found is not None
        assert evaluation_values(found) == evaluation_values(answer(1, 1, 2, components={"exact_match": 1.0}))
        assert found.trace == answer(1).trace
        assert (found.label, found.row, found.stop_reason) == ("Ann", 1, StopReason.ANSWERED)
        assert answers.take(new(1, 0, 2)) is None
        assert file.of("other", 0.0).take(new(1, 1, 2)) is None
        assert file.of("demo", 1.0).take(new(1, 1, 2)) is None
        other_prompt = new(1, 1, 2)
        other_prompt.trace = TokenTrace([1, 2])
        assert answers.take(other_prompt) is None
        assert not file.has_all({"demo": 1}, [0.0])
        file.add("demo", 0.0, answer(0, 1, 2))
    with opened(tmp_path / "a.jsonl", samples=2) as file:
        assert file.has_all({"demo": 1}, [0.0])
        assert not file.has_all({"demo": 1}, [0.0, 1.0])


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with opened(path) as file:
        file.add("demo", 0.0, answer(0))
        whole = path.stat().st_size
        file.add("demo", 0.0, answer(1))
    with path.open("rb+") as torn:
        torn.truncate(whole + 100)
    with opened(path) as file:
        assert file.finished == 1
        file.add("demo", 0.0, answer(1))
    assert [record["group_index"] for record in read_trajectories(path)] == [0, 1]


@pytest.mark.parametrize(
    ("text", "whole"),
    [(b"", 0), (b"a", 0), (b"a\n", 2), (b"a\nb", 2), (b"x" * 70_000 + b"\n" + b"y" * 200_000, 70_001)],
)
def test_where_the_last_whole_line_ends(tmp_path: Path, text: bytes, whole: int) -> None:
    (tmp_path / "a").write_bytes(text)
    assert whole_length(tmp_path / "a") == whole


def test_failed_trajectories_are_kept_beside_the_answers(tmp_path: Path) -> None:
    with opened(tmp_path / "a.jsonl") as file:
        file.of("demo", 0.0).failed(answer(0, status=SampleStatus.FAILED, reason=StopReason.SEARCH_FAILED))
        assert (file.finished, len(file.failed)) == (0, 1)
    with opened(tmp_path / "a.jsonl") as file:
        assert file.finished == 0
        ((name, temperature, sample),) = file.failed
        assert (name, temperature, sample.stop_reason) == ("demo", 0.0, StopReason.SEARCH_FAILED)


def test_the_file_of_another_evaluation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with opened(path) as file:
        file.add("demo", 0.0, answer(0))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"found .*a.jsonl of another one \(sampling.seed: 1, now 2\); name another"):
        opened(path, {"model": {"name": "a"}, "sampling": {"seed": 2}})
    assert path.read_bytes() == before


def test_a_file_without_answers_becomes_that_of_the_evaluation(tmp_path: Path) -> None:
    opened(tmp_path / "a.jsonl").close()
    opened(tmp_path / "a.jsonl", {"model": {"name": "b"}}).close()
    assert json.loads((tmp_path / "a.json").read_text())["settings"] == {"model": {"name": "b"}}


@pytest.mark.parametrize("beside", [None, "{", "{}", "[]"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, beside: str | None) -> None:
    (tmp_path / "a.jsonl").write_text("mine\n")
    if beside is not None:
        (tmp_path / "a.json").write_text(beside)
    with pytest.raises(ValueError, match=r"expected (answers|the settings) of tools/eval.py"):
        opened(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == "mine\n"


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "a.jsonl"), pytest.raises(ValueError, match="in use by another evaluation"):
        opened(tmp_path / "a.jsonl")


def test_results_stand_beside_the_answers(tmp_path: Path) -> None:
    with opened(tmp_path / "a.jsonl") as file:
        file.add("demo", 0.0, answer(0))
        assert Evaluation.read(tmp_path / "a.jsonl").results == {}
        file.finish({"seconds": 3.0})
    read = Evaluation.read(tmp_path / "a.jsonl")
    assert (read.settings, read.results) == (SETTINGS, {"seconds": 3.0})
    assert (read.records[0]["set"], read.records[0]["temperature"]) == ("demo", 0.0)
