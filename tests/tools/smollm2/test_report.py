"""The report of run_smollm2.sh, from metrics as a run writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.smollm2 import report


def write_metrics(folder: Path, *lines: dict[str, float]) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_three_stages_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path / "zero/greedy", {"step": 1, "reward/exact_match": 0.01, "rollout/searches": 0.1})
    write_metrics(
        tmp_path / "run",
        {"step": 0, "eval/demo/greedy/em": 0.3, "eval/demo/t1.0/em": 0.2},
        {"step": 1, "reward/mean": 0.2},
        {"step": 2, "eval/demo/greedy/em": 0.5},
    )
    assert (
        report.main(["--zero-shot", str(tmp_path / "zero"), "--run-dir", str(tmp_path / "run"), "--started", "1"]) == 0
    )
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 2
    greedy = {"zero-shot": 0.01, "warm-up": 0.3, "reinforcement": 0.5}
    assert summary["table"]["greedy"]["exact match"] == greedy
    assert summary["table"]["t1"]["exact match"] == {"zero-shot": None, "warm-up": 0.2, "reinforcement": None}
    out = capsys.readouterr().out
    assert "0.010" in out
    assert "missing" in out
    assert (tmp_path / "run/curves.png").stat().st_size > 1000


def test_a_folder_without_metrics_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(["--zero-shot", str(tmp_path), "--run-dir", str(tmp_path)])
    assert "found no such file; check --run-dir" in capsys.readouterr().err


def test_an_empty_file_of_metrics_is_shown_as_missing_and_a_damaged_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(tmp_path / "zero/greedy")
    write_metrics(tmp_path / "run", {"step": 0})
    flags = ["--zero-shot", str(tmp_path / "zero"), "--run-dir", str(tmp_path / "run")]
    assert report.main(flags) == 0
    (tmp_path / "zero/greedy/metrics.jsonl").write_text("torn\n{}\n")
    with pytest.raises(SystemExit):
        report.main(flags)
    assert "line 1: expected a JSON object" in capsys.readouterr().err
