"""A run's folders are its own: `train.py` as a user starts it, twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sleuth.arguments import parse_args
from sleuth.cluster.run_folders import own_folders
from sleuth.folder_lock import locked

ROOT = Path(__file__).parents[2]


def flags(tmp_path: Path, *more: str) -> list[str]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"segments": [{"text": "a", "weight": 0}, {"text": "b", "weight": 1}]}))
    return [
        *("--loss-type", "sft", "--hf-checkpoint", "data/demo/model", "--prompt-data", str(rows), "--num-rollout", "1"),
        *("--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "save"), *more),
    ]


def test_a_second_run_is_refused_before_it_writes_anything(tmp_path: Path) -> None:
    with locked("--save", tmp_path / "save"):
        ended = subprocess.run(
            [sys.executable, "train.py", *flags(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=200
        )
    assert ended.returncode == 1
    assert "in use by process" in ended.stderr
    assert str(tmp_path / "save") in ended.stderr
    assert ended.stderr.strip().count("\n") == 0, ended.stderr
    assert not (tmp_path / "run/config.yaml").exists()
    assert not (tmp_path / "run/logs").exists()


def test_results_of_another_run_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    run, save = tmp_path / "run", tmp_path / "save"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    args = parse_args(flags(tmp_path))
    with pytest.raises(ValueError, match=r"steps 1 to 2.*--load") as refused, own_folders(args):
        pass
    assert str(run) in str(refused.value)
    with own_folders(args.model_copy(update={"load": save})):
        pass
    (run / "metrics.jsonl").unlink()
    with own_folders(args), pytest.raises(ValueError, match=r"--save: .* in use"), locked("--save", save):
        pass


def test_one_folder_for_both_is_locked_once(tmp_path: Path) -> None:
    with own_folders(parse_args(flags(tmp_path, "--save", str(tmp_path / "run/../run")))):
        pass
