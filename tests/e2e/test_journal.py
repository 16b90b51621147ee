"""Runs that are killed go on with the samples that they had, and end with the weights that those samples lead to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from sleuth.rollout.journal import Key, read_step, step_file
from sleuth.sample import Sample
from tests.e2e.runs import processes_of, run_training, started_training, wait_until
from tests.e2e.test_resume import content

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

STEPS = 4
SAMPLES = 32
"""Of one step, by the fixture `flags`."""


def recorded(save: Path, step: int) -> dict[Key, Sample]:
    record = read_step(step_file(save / "journal", step))
    return {} if record is None else record.samples


def killed(flags: list[str], run_dir: Path, condition: Callable[[], object], what: str) -> None:
    """Start a run, and kill all of it at once as soon as `condition` holds."""
    with started_training(flags) as process:
        wait_until(lambda: condition() or process.poll() is not None, what)
        assert process.poll() is None, process.communicate()[0]
        tree = [
            *psutil.Process(process.pid).children(recursive=True),
            psutil.Process(process.pid),
            *processes_of(run_dir),
        ]
        for member in tree:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
    wait_until(lambda: not processes_of(run_dir), "the end of what was killed", 60)


def test_no_sample_is_lost_or_made_twice_however_often_a_run_is_killed(flags: list[str], tmp_path: Path) -> None:
    save, run_dir = tmp_path / "save", tmp_path / "run"
    kept = ["--num-rollout", str(STEPS), "--save-interval", "2", "--save-keep", "0", "--load", str(save)]
    flags = [*flags, *kept]
    before: dict[int, dict[Key, Sample]] = {}
    moments = {
        "samples of the first step": (1, lambda: len(recorded(save, 1)) >= 3),
        "samples of a step after a checkpoint": (3, lambda: len(recorded(save, 3)) >= 3),
        "training on the last step": (4, lambda: len(recorded(save, 4)) == SAMPLES),
    }
    for what, (step, condition) in moments.items():
        killed(flags, run_dir, condition, what)
        for earlier in range(1, step + 1):
            now = recorded(save, earlier)
            assert {key: now[key] for key in before.get(earlier, {})} == before.get(earlier, {})
            before[earlier] = now
        assert len(before[step]) >= 3
    code, output = run_training(flags)
    assert code == 0, output
    assert f"resumed from step 2 of {save}" in output or f"resumed from step 4 of {save}" in output
    for step in range(1, STEPS + 1):
        samples = recorded(save, step)
        assert len(samples) == SAMPLES
        assert {key: samples[key] for key in before[step]} == before[step]
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert sum(line.get("rollout/from_journal", 0) for line in lines) >= 3

    replay = [
        *("--debug-train-only", str(save), "--save", str(tmp_path / "again")),
        "--run-dir",
        str(tmp_path / "run2"),
    ]
    code, output = run_training([*flags, *replay, "--load", str(tmp_path / "again")])
    assert code == 0, output
    assert "without an answer" not in output  # the journal has no labels
    expected, found = content(tmp_path / "again", STEPS), content(save, STEPS)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    assert found[1] == expected[1]
