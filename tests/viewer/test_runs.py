"""What the viewer finds in a run's folder: filters, search, pages, comparisons, tokens; folders that are not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sleuth.metrics.trajectories import read_trajectories
from sleuth.viewer.index import Query
from sleuth.viewer.pieces import token_texts
from sleuth.viewer.runs import ALL, PAGE, Run, differing, named_runs, trainer_log_probs
from tests.viewer.made_runs import (
    ARABIC,
    EMOJI,
    SCRIPT,
    encoded,
    made_sample,
    tokenizer,
    write_run,
    write_samples,
    write_trainer_log_probs,
)

STEP = "step_0000001.jsonl"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = write_run(tmp_path / "a")
    samples = [
        made_sample(0, "Ann", right=True),
        made_sample(1, "Bob", right=False),
        made_sample(2, EMOJI, right=False, valid=False),
        made_sample(3, ARABIC, right=False, searches=0),
        made_sample(4, SCRIPT, right=False),
    ]
    write_samples(folder, STEP, samples)
    return Run(folder, "a")


def numbers(run: Run, **query: object) -> list[int]:
    return [row["number"] for row in run.page(STEP, Query(**query), 0)["rows"]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "found"),
    [("all", [0, 1, 2, 3, 4]), ("right", [0]), ("wrong", [1, 2, 3, 4]), ("invalid", [2]), ("no search", [3])],
)
def test_filters(run: Run, name: str, found: list[int]) -> None:
    assert numbers(run, filter=name) == found


def test_text_is_found_in_prompt_response_and_notes_whatever_its_case(run: Run) -> None:
    assert numbers(run, text="🦊") == [2]
    assert numbers(run, text=ARABIC[:5]) == [3]
    assert numbers(run, text="ANN") == [0]
    assert numbers(run, text="book 1") == [2, 3]
    assert numbers(run, text="book 1", filter="invalid") == [2]
    assert numbers(run, text="prompt_ids") == []
    assert numbers(run, group=0) == [0, 1]


def test_an_unknown_filter_is_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="expected one of all, right"):
        numbers(run, filter="odd")


def test_what_changed_between_two_checkpoints(run: Run) -> None:
    before = [made_sample(0, "Bob", right=False), made_sample(1, "Ann", right=True), made_sample(2, "no", right=False)]
    after = [made_sample(0, "Ann", right=True), made_sample(1, "Ann", right=True), made_sample(2, "Ann", right=True)]
    write_samples(run.folder, "eval_0000000_demo_greedy.jsonl", before)
    write_samples(run.folder, "eval_0000010_demo_greedy.jsonl", after[::-1])  # found by question, not by place
    compared = Query(compare=run.file("eval_0000000_demo_greedy.jsonl"))
    rows = run.page("eval_0000010_demo_greedy.jsonl", compared, 0)["rows"]
    assert [(row["index"], row["before"], row["right"]) for row in rows] == [(2, False, True), (0, False, True)]


def test_pages_are_cut_on_the_server_and_all_files_can_be_searched(run: Run) -> None:
    write_samples(run.folder, "step_0000002.jsonl", [made_sample(i, "Ann", right=True) for i in range(PAGE + 5)])
    second = run.page("step_0000002.jsonl", Query(), PAGE)
    assert (second["total"], len(second["rows"]), second["rows"][0]["number"]) == (PAGE + 5, 5, PAGE)
    everywhere = run.page(ALL, Query(text="bob"), 0)
    assert (everywhere["total"], everywhere["of"]) == (1, PAGE + 10)
    assert (everywhere["rows"][0]["file"], everywhere["rows"][0]["number"]) == (STEP, 1)
    assert [file.step for file in run.files()] == [1, 2]


def test_a_trajectory_is_whole_and_its_pieces_join_to_its_text(run: Run) -> None:
    for number in range(5):
        found = run.trajectory(STEP, number)
        record = read_trajectories(run.folder / "trajectories" / STEP)[number]
        assert found["record"] == record
        for segment, pieces in zip(record["segments"], found["pieces"], strict=True):
            assert "".join(text for _, text in pieces) == segment["text"]
            assert sum(count for count, _ in pieces) == segment["tokens"]
    assert run.trajectory(STEP, 1)["findings"][:2] == [("Expected", "Ann"), ("Answered", "Bob")]
    assert [row["number"] for row in run.trajectory(STEP, 1)["group"]] == [0, 1]
    with pytest.raises(KeyError, match="expected a trajectory below 5"):
        run.trajectory(STEP, 5)


def test_an_emoji_of_several_tokens_is_one_piece() -> None:
    ids = encoded("a🦊b")
    assert len(ids) > 3
    assert token_texts(ids, tokenizer().backend_tokenizer) == [(1, "a"), (len(ids) - 2, "🦊"), (1, "b")]
    cut = token_texts(ids[: len(ids) // 2], tokenizer().backend_tokenizer)  # a limit cut the character
    assert sum(count for count, _ in cut) == len(ids) // 2


def test_a_hundred_thousand_tokens(run: Run) -> None:
    sample = made_sample(0, "x", right=False)
    sample.trace.append_model([20] * 100_000, [-0.1] * 100_000)
    write_samples(run.folder, STEP, [sample])
    found = run.trajectory(STEP, 0)
    assert sum(count for pieces in found["pieces"] for count, _ in pieces) == len(sample.trace.response_ids)


def test_without_the_tokenizer_the_text_stays_whole(run: Run) -> None:
    (run.folder / "config.yaml").write_text("hf_checkpoint: /nowhere/model\n")
    assert run.trajectory(STEP, 0)["pieces"] is None
    (run.folder / "config.yaml").unlink()
    assert Run(run.folder, "a").trajectory(STEP, 0)["pieces"] is None


def test_log_probabilities_of_the_trainer_are_shown_where_they_fit(run: Run) -> None:
    path = run.folder / "trajectories" / STEP
    length = len(run.trajectory(STEP, 1)["record"]["response_ids"])
    assert run.trajectory(STEP, 1)["trainer"] is None
    write_trainer_log_probs(run.folder, path.stem, [None, [-0.5] * length, [-0.5]])
    assert run.trajectory(STEP, 1)["trainer"] == [-0.5] * length
    assert [trainer_log_probs(path, number, length) for number in (0, 2, 9)] == [None] * 3
    path.with_suffix(".trainer.json").write_text("{")
    assert trainer_log_probs(path, 1, length) is None


def test_a_file_is_read_again_when_it_changed_and_a_torn_line_is_counted(run: Run) -> None:
    assert len(numbers(run)) == 5
    path = run.folder / "trajectories" / STEP
    whole = path.read_bytes()
    path.write_bytes(whole[:-300])
    page = run.page(STEP, Query(), 0)
    assert (page["total"], page["broken"]) == (4, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"segments": [1]},
        {"segments": [{"source": "model", "tokens": "three", "text": ""}]},
        {"notes": None},
        {"reward_components": [1]},
        {"reward": "high"},
        {"index": "first"},
        {"prompt": 5},
    ],
)
def test_a_record_of_another_shape_is_counted_and_the_others_are_shown(run: Run, other: dict[str, object]) -> None:
    path = run.folder / "trajectories" / STEP
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole.partition("\n")[0]) | other) + "\n" + whole)
    page = run.page(STEP, Query(text="e", compare=run.file(STEP)), 0)
    assert (page["of"], page["broken"]) == (5, 1)
    assert run.trajectory(STEP, 0)["record"]["index"] == 0


def test_metrics_of_runs_that_are_not_whole(run: Run, tmp_path: Path) -> None:
    path = run.folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "rewa')
    assert (run.summary()["step"], run.summary()["problem"]) == (3, None)
    path.write_text('{"step": "one"}\n' + path.read_text())
    assert "line 1" in (run.summary()["problem"] or "")
    path.unlink()
    assert "no step was logged yet" in (run.summary()["problem"] or "")
    assert run.summary()["live"] is False


def test_runs_are_named_as_shortly_as_they_differ(tmp_path: Path) -> None:
    paths = [
        tmp_path / "x" / "one",
        tmp_path / "y" / "one",
        tmp_path / "y" / "two",
        tmp_path / "y" / ".." / "y" / "two",
    ]
    assert [run.name for run in named_runs(paths)] == ["x/one", "y/one", "y/two"]
    assert [run.name for run in named_runs(paths[1:])] == ["one", "two"]


def test_settings_that_differ() -> None:
    assert differing([{"lr": 1, "seed": 1}, {"lr": 2, "seed": 1, "new": None}]) == {"lr": [1, 2]}


def test_ports_on_the_own_machine_make_no_difference() -> None:
    def at(host: str) -> dict[str, object]:
        return {"search_r1": {"local": {"search_url": f"http://{host}/retrieve"}}}

    assert differing([at("127.0.0.1:40123"), at("127.0.0.1:8000")]) == {}
    assert differing([at("node7:8000"), at("node7:8001")]) != {}
    assert differing([at("127.0.0.1:8000"), at("node7:8000")]) != {}
