"""Evaluations side by side: what may be compared, the numbers, and the questions that changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sleuth.sample import SampleStatus, StopReason
from tests.metrics.samples import make_sample, word_tokenizer
from tools.analyse import main
from tools.evaluation.answers import AnswerFile, Evaluation
from tools.evaluation.comparison import compare
from tools.evaluation.statistics import mcnemar

SETTINGS: dict[str, Any] = {
    "model": {"name": "a"},
    "data": {"demo": {"questions": 40, "labels": "x"}},
    "prompts": {"prompt_template": None, "texts": {"demo": "x"}},
    "sampling": {"seed": 1},
    "hooks": {"generate": "h.generate"},
    "hook_settings": {"search_r1": {"topk": 3}},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def written(name: str, right: Sequence[Sequence[int]], finished: bool = True, **settings: Any) -> Path:
    """The answers to questions, `right[question][sample]`; even rows are of nq, odd ones of pop."""
    path, samples = Path(f"{name}.jsonl"), max(map(len, right))
    given = copy.deepcopy(SETTINGS) | {"model": {"name": name}} | settings
    with AnswerFile(path, given, word_tokenizer(), samples) as file:
        for row, answers in reversed(list(enumerate(right))):
            for number, em in enumerate(answers):
                components = {"exact_match": float(em), "valid_format": 1.0}
                sample = make_sample(row * samples + number, row, reward=float(em), components=components)
                sample.metadata, sample.label = {"data_source": ("nq", "pop")[row % 2]}, f"label {row}"
                sample.file, sample.row = "test.parquet", row
                sample.report(searches=1, search_seconds=0.1, answer=f"{name} says {em}")
                file.add("demo", 0.0, sample)
        if finished:
            file.finish({"evaluations": {}})
    return path


BEFORE = [[0]] * 30 + [[1]] * 10
AFTER = [[1]] * 12 + [[0]] * 18 + [[1]] * 9 + [[0]]


def test_two_models_are_compared_on_the_same_questions(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = written("before", BEFORE), written("after", AFTER)
    assert main([str(first), str(second), "--png", "plots/change.png", "--changes", "changes.md", "--list", "2"]) == 0
    out = capsys.readouterr().out
    assert "demo, temperature 0: 40 questions" in out
    assert "after against before, em: 12 questions better, 1 worse; McNemar's exact test: p = 0.0034" in out
    assert "after - before" in out
    assert "+0.275" in out
    assert "  better: row 0 of test.parquet: before says 0 -> after says 1 (label 0)" in out
    assert "  better: and 10 more (--list, --changes)" in out
    assert "  worse: row 39 of test.parquet: before says 1 -> after says 0 (label 39)" in out
    assert Path("plots/change.png").stat().st_size > 5000
    text = Path("changes.md").read_text()
    assert text.count("**before**") == text.count("**after**") == 13
    assert "Answered: before says 0" in text


def test_the_numbers_are_paired() -> None:
    files = [Evaluation.read(written("before", BEFORE)), Evaluation.read(written("after", AFTER))]
    (comparison,) = compare(files)
    assert list(comparison.scopes) == ["nq", "pop", "all"]
    found = comparison.differences(1)["em"]
    assert found.value == pytest.approx(11 / 40)
    assert 0.1 < found.low < found.value < found.high < 0.45
    assert comparison.differences(1)["search_success"].value == 0.0
    assert comparison.measures(0, "nq")["em"]["value"] == pytest.approx(5 / 20)
    assert comparison.p_value(1) == ("McNemar's exact test", mcnemar(1, 12))


def test_several_samples_are_compared_by_their_means() -> None:
    files = [written("a", [[0, 1], [0, 0], [1, 1]] * 5), written("b", [[1, 1], [0, 1], [1, 1]] * 5)]
    (comparison,) = compare([Evaluation.read(path) for path in files])
    name, p = comparison.p_value(1)
    assert name == "paired bootstrap"
    assert 0 < p < 0.05
    better, worse = comparison.changed(1)
    assert (len(better), len(worse)) == (10, 0)


def test_three_are_compared_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(written(name, [[right], [1]])) for name, right in (("a", 0), ("b", 1), ("c", 0))]
    assert main([*files, "--labels", "x", "y", "z"]) == 0
    out = capsys.readouterr().out
    assert "y against x, em: 1 questions better, 0 worse" in out
    assert "z against x, em: 0 questions better, 0 worse" in out


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("data", {"data": {"demo": {"questions": 39, "labels": "x"}}}, "data.demo.questions: 40, now 39"),
        (
            "prompts",
            {"prompts": {"prompt_template": "tags", "texts": {"demo": "x"}}},
            "prompts.prompt_template: -, now",
        ),
        ("sampling", {"sampling": {"seed": 2}}, "sampling.seed: 1, now 2"),
        ("search", {"hook_settings": {"search_r1": {"topk": 5}}}, "hook_settings.search_r1.topk: 3, now 5"),
        ("search", {"hooks": {"generate": "g.generate"}}, "hooks.generate: h.generate, now g.generate"),
    ],
)
def test_other_settings_are_refused_unless_allowed(
    capsys: pytest.CaptureFixture[str], kind: str, settings: dict[str, Any], message: str
) -> None:
    files = [str(written("a", [[0]])), str(written("b", [[1]], **settings))]
    with pytest.raises(SystemExit) as end:
        main(files)
    assert end.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert f"add --allow {kind} if that is what is compared" in error
    assert main([*files, "--allow", kind]) == 0


def test_only_shared_questions_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    other = {
        "data": {"demo": {"questions": 2, "labels": "y"}},
        "prompts": SETTINGS["prompts"] | {"texts": {"demo": "y"}},
    }
    files = [str(written("a", [[0], [1], [1]])), str(written("b", [[1], [1]], finished=False, **other))]
    assert main([*files, "--allow", "data"]) == 0
    out = capsys.readouterr().out
    assert "demo, temperature 0: 2 questions (1 that not all have are left out)" in out
    assert "warning: b.jsonl is not finished; the answers that it has are compared" in out


def test_failed_trajectories_are_no_answers() -> None:
    path = written("a", [[1], [0]], finished=False)
    lost = make_sample(0, 0, status=SampleStatus.FAILED, reason=StopReason.SEARCH_FAILED, label="label 0", source="nq")
    lost.file, lost.row = "test.parquet", 0
    with AnswerFile(path, SETTINGS | {"model": {"name": "a"}}, word_tokenizer()) as file:
        file.of("demo", 0.0).failed(lost)
    (comparison,) = compare([Evaluation.read(path)] * 2)
    assert len(comparison.keys) == 2
    assert comparison.measures(0)["search_success"]["value"] == pytest.approx(2 / 3)


def test_what_is_no_evaluation_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, other = str(written("a", [[1]])), str(written("b", [[0]]))
    (folder / "x.jsonl").write_text("{}\n")
    empty = str(written("empty", [[]]))
    for files, message in (
        ([good], "expected two files or more, found one"),
        ([good, "nowhere.jsonl"], "which has its settings in nowhere.json, found none there"),
        ([good, "x.jsonl"], "expected answers of tools/eval.py"),
        ([good, good], "--labels: expected 2 different ones, found a a"),
        ([good, empty], "empty.jsonl has none"),
        ([good, other, "--measure", "accuracy"], "--measure: expected one of em, "),
    ):
        with pytest.raises(SystemExit) as end:
            main(files)
        assert end.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_torn_last_line_is_left_out_and_a_record_of_another_shape_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = written("a", [[1], [0], [1]]), written("b", [[0], [0], [1]], finished=False)
    whole = other.read_text()
    other.write_text(whole[:-40])
    assert main([str(good), str(other)]) == 0
    assert "2 questions (1 that not all have are left out)" in capsys.readouterr().out
    first = json.loads(whole.partition("\n")[0])
    for broken in ({"segments": [1]}, {"status": "new"}, {"rollout_metrics": None}, {"temperature": None}):
        other.write_text(json.dumps(first | broken) + "\n" + whole)
        with pytest.raises(SystemExit):
            main([str(good), str(other)])
        assert "in line 1 of b.jsonl, found" in " ".join(capsys.readouterr().err.split())
    other.write_text(whole)
    for settings, message in (
        ([], "found another file; name another"),
        ({"data": {}}, "differ in more than the model"),
    ):
        Path("b.json").write_text(json.dumps({"format": 1, "settings": settings}))
        with pytest.raises(SystemExit):
            main([str(good), str(other)])
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_picture_or_a_list_that_cannot_be_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(written("a", [[1], [0]])), str(written("b", [[0], [1]]))]
    for flags, message in (
        (["--png", "a.jsonl/x.png"], "expected the name of a PNG that can be written"),
        (["--changes", "a.jsonl/x.md"], "a.jsonl"),
        (["--list", "-1"], "--list: expected 0 or more"),
        (["--labels", "a", "a", "b"], "--labels: expected 2 different ones"),
    ):
        with pytest.raises(SystemExit) as end:
            main([*files, *flags])
        assert end.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())
