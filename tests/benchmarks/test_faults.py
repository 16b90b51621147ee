"""What the bench of faults keeps and prints, and that it can tell an exact run from another; no run is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import faults, soak_run
from benchmarks.fault_trials import rows
from benchmarks.fault_trials.trial import ROOT, Trial, TrialError, same
from sleuth.arguments import parse_args


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "done": "x", "noticed": 1.0, "said": "a|b", "exact": True, "seconds": 5} | changes


def test_results_are_kept_where_a_bench_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "new/faults.jsonl"
    assert faults.known(path) == {}
    faults.write_row(path, row("full disk"))
    faults.write_row(path, row("journal"))
    path.write_text(path.read_text()[:-9])  # killed while it wrote
    assert faults.known(path).keys() == {"full disk"}
    faults.write_row(path, row("journal", exact=False))
    faults.write_row(path, row("full disk", exact=None, noticed=None))
    found = faults.known(path)
    assert (found["journal"]["exact"], found["full disk"]["exact"]) == (False, None)
    _, _, disk, journal = faults.table(found).splitlines()
    assert disk == "| full disk | x |  | a/b | not tried |"
    assert journal == "| journal | x | 1.0 s | a/b | NO |"


def test_what_a_run_said_is_told_without_its_folders(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    trial = Trial(folder)
    trial.output_file.write_text(
        f"starting; logs: {folder}/run/logs\n"
        "\x1b[36m(RolloutActor pid=3)\x1b[0m 2026-01-02 03:04:05,678 WARNING sleuth.search.http: no answer in 60 s\n"
        f"2026-01-02 03:04:05,678 WARNING sleuth.cluster.engines: engine 0: see {folder}/run/x; it is started again\n"
        f"error: expected room in {folder}/save\n"
    )
    assert trial.said(rows.STOPPED) == "no answer in 60 s"
    assert trial.said(rows.ENDED) == "engine 0: see run/x; it is started again"
    assert trial.said(rows.ENDED, trial.output().index("error")) == "error: expected room in save"


def test_rows_that_are_done_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def outcome(name: str, folder: Path) -> dict[str, Any]:
        tried.append(name)
        return row(name, exact=name != "dead trainer")

    monkeypatch.setattr(faults, "outcome", outcome)
    monkeypatch.setattr(faults, "end_on_term", lambda: None)
    names = ["dead engine", "dead trainer"]
    for more, expected in (([], names), ([], names), (["--again"], names * 2)):
        monkeypatch.setattr(sys, "argv", ["faults", "--output", str(tmp_path), "--only", *names, *more])
        with pytest.raises(SystemExit) as ended:
            faults.main()
        assert ended.value.code  # a row was not exact
        assert tried == expected
    assert capsys.readouterr().out.count("| dead engine |") == 3


def test_the_list_names_each_row_and_a_wrong_name_is_told() -> None:
    command = [sys.executable, "-m", "benchmarks.faults"]
    listed = subprocess.run([*command, "--list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == len(rows.ROWS) >= 15
    assert "10 SIGKILLs of all processes" in listed
    wrong = subprocess.run([*command, "--only", "fire"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "'kill in sync'" in wrong.stderr


def test_a_trial_that_cannot_be_made_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(trial: Trial) -> rows.Row:
        raise TrialError("no engine here")

    monkeypatch.setitem(rows.ROWS, "full disk", ("x", impossible))
    found = rows.outcome("full disk", tmp_path / "trial")
    assert (found["exact"], found["said"]) == (None, "not tried: no engine here")


def test_the_trials_flags_are_accepted(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "trial")
    (trial.folder / "search.yaml").write_text("search_r1: {topk: 1}\n")
    args = parse_args([*trial.flags(), "--save", str(trial.save), "--load", str(trial.save)])
    assert (args.num_rollout, args.save_interval, args.samples_per_step) == (4, 2, 32)


def test_equal_means_bit_for_bit() -> None:
    state: dict[str, Any] = {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"c": "x"}}
    assert same(state, {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"c": "x"}})
    for other in (
        {"a": [torch.tensor([1.0, 2.0000002]), 3], "b": {"c": "x"}},
        {"a": [torch.tensor([1.0, 2.0]).double(), 3], "b": {"c": "x"}},
        {"a": [torch.tensor([1.0, 2.0])], "b": {"c": "x"}},
        {"a": [torch.tensor([1.0, 2.0]), 3]},
    ):
        assert not same(state, other)
        assert not same(other, state)


def test_what_is_seen_of_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "trial")
    assert (trial.recorded(1), trial.rolled_out(1), trial.lines(), trial.last_words()) == ({}, False, [], "")
    assert not any(condition(trial) for _, condition in [*rows.MOMENTS.values(), *rows.JOURNAL_MOMENTS])
    (trial.run_dir / "logs").mkdir(parents=True)
    (trial.run_dir / "logs/engine_0.log").write_text("Weight version changed. old_version='2' new_version='3'")
    assert rows.MOMENTS["sync"][1](trial)
    (trial.run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, "rollout/from_journal": 7}) + "\n")
    trial.starts = 1
    trial.output_file.write_text(f"resumed from step 2 of {trial.save}\nend\n")
    assert trial.resumed() == "resumed from step 2 of SAVE; 7 samples from the journal"
    assert trial.last_words() == "end"


class Run:
    """What a soak sees of a run: one process of each part, and whether the run lives."""

    def __init__(self, lives: bool) -> None:
        self.lives, self.process, self.killed = lives, None, 0

    def processes(self, log: str) -> list[Any]:
        return [psutil.Process()]

    def kill_all(self) -> None:
        self.lives, self.killed = False, self.killed + 1


@pytest.mark.parametrize(
    ("part", "lives", "event", "killed"),
    [
        ("engine", True, {}, 0),  # the run starts it again
        ("rollout actor", True, {}, 0),
        ("trainer", False, {"noticed": True}, 1),
        ("trainer", True, {"noticed": False}, 1),
        ("everything", True, {}, 1),
    ],
)
def test_a_soak_waits_only_for_a_run_that_has_to_end(
    part: str, lives: bool, event: dict[str, bool], killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_run, "send", lambda victims, number: None)
    monkeypatch.setattr(soak_run, "MOST_SECONDS_TO_END", 0.0)
    run: Any = Run(lives)
    soak = soak_run.Soak(run, 1, 90.0, tmp_path / "soak.jsonl")
    soak.disturb("kill", part)
    (found,) = soak.events
    assert (found["what"], found["part"]) == ("kill", part)
    assert {name: value for name, value in found.items() if name == "noticed"} == event
    assert run.killed == killed
