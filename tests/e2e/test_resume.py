"""A run that is interrupted, saves what it has, is resumed, and whose trainer dies ends as one without all that."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from tests.e2e.conftest import MODEL
from tests.e2e.runs import RUN_SECONDS, processes_of, run_training, started_training, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

STEPS = 30


def supervised(tmp_path: Path, name: str, *flags: str) -> list[str]:
    """A run without engines: what it does depends on nothing but its data. Saves at the end alone."""
    data = tmp_path / "trajectories.jsonl"
    if not data.exists():
        rows = [
            [{"text": f"who wrote {i}?", "weight": 0.0}, {"text": f" number {i} did", "weight": 1.0}] for i in range(9)
        ]
        data.write_text("".join(json.dumps({"segments": row}) + "\n" for row in rows))
    return [
        *("--loss-type", "sft", "--hf-checkpoint", str(MODEL), "--prompt-data", str(data), "--lr", "1e-3"),
        *("--rollout-batch-size", "8", "--global-batch-size", "4", "--rollout-shuffle", "--save-interval", "1000"),
        *("--run-dir", str(tmp_path / name / "run"), "--save", str(tmp_path / name / "save")),
        *("--num-rollout", str(STEPS), *flags),
    ]


def content(save: Path, step: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A checkpoint's tensors, its rollout state and the first rank's random state."""
    folder = save / f"iter_{step:07d}"
    keys = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    tensors = _load_state_dict_from_keys(keys, storage_reader=FileSystemReader(folder))
    return (
        {key: tensors[key] for key in keys if key in tensors},
        json.loads((folder / "rollout_state.json").read_text()),
        torch.load(folder / "rng_00000.pt", weights_only=True),
    )


def steps_of(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_an_interrupted_run_that_is_resumed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    code, output = run_training(supervised(tmp_path, "whole"))
    assert code == 0, output
    assert "resumed" not in output

    flags = supervised(tmp_path, "cut")
    save, run_dir = tmp_path / "cut/save", tmp_path / "cut/run"
    with started_training(flags) as process:
        wait_until(lambda: len(steps_of(run_dir)) >= 5, "the fifth step")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 1, output
    step = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert 5 <= step < STEPS
    assert f"; step {step} is saved in {save}; --load {save} goes on from it" in output
    assert "Traceback" not in output
    assert steps_of(run_dir) == list(range(1, step + 1))
    assert processes_of(run_dir) == []

    # It goes on, loses its trainer, and starts itself again.
    with started_training([*flags, "--load", str(save), "--save-interval", "5", "--restarts", "1"]) as process:
        wait_until(lambda: len(steps_of(run_dir)) >= step + 2, "two more steps")
        next(member for member in processes_of(run_dir) if "TrainActor" in " ".join(member.cmdline())).kill()
        output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, output
    assert f"resumed from step {step} of {save}\n" in output
    assert "expected TrainActor (process " in output
    again = re.search(rf"; the run is started again from step (\d+) of {save} \(1 of at most 1 times\)\n", output)
    assert again, output
    assert step <= int(again[1]) < STEPS
    assert f"resumed from step {again[1]} of {save}\n" in output
    assert processes_of(run_dir) == []
    assert f"resumed from step {step} of {save}\n" in (run_dir / "logs/driver.log").read_text()
    assert steps_of(run_dir) == list(range(1, STEPS + 1))
    expected, found = (content(tmp_path / name / "save", STEPS) for name in ("whole", "cut"))
    assert found[1] == expected[1]
    assert len(expected[0]) > 20
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=0)

    code, output = run_training([*flags, "--load", str(save)])
    assert (code, output.count("\n")) == (0, 1)
    assert f"the checkpoint in {save} holds step {STEPS}, --num-rollout {STEPS} is done; raise --num-rollout" in output
    code, output = run_training([*flags, "--load", str(save), "--num-rollout", "3"])
    assert (code, output.count("\n")) == (2, 1)
    assert f"expected at most --num-rollout 3; raise --num-rollout above {STEPS}" in output


def test_finetuning_takes_other_data_and_begins_anew(tmp_path: Path) -> None:
    code, output = run_training(supervised(tmp_path, "first", "--num-rollout", "2"))
    assert code == 0, output
    other = tmp_path / "other.jsonl"
    other.write_text('{"segments": [{"text": "a b c", "weight": 1.0}]}\n' * 3)
    new = ["--prompt-data", str(other), "--num-rollout", "1", "--load", str(tmp_path / "first/save")]
    code, output = run_training([*supervised(tmp_path, "second"), *new])
    assert code == 2, output  # one step is less than the checkpoint holds
    code, output = run_training([*supervised(tmp_path, "second"), *new, "--num-rollout", "3"])
    assert code == 1
    assert "the checkpoint's data cursor is for 9 rows, but the data has 3" in output
    assert "(--finetune loads weights alone)" in output
    code, output = run_training([*supervised(tmp_path, "second"), *new, "--finetune"])
    assert code == 0, output
    assert f"starting from the weights of {tmp_path / 'first/save'} (--finetune)\n" in output
    assert (tmp_path / "second/save/latest_checkpointed_iteration.txt").read_text() == "1"
    assert steps_of(tmp_path / "second/run") == [1]


def test_an_empty_folder_to_resume_from_starts_a_new_run(tmp_path: Path) -> None:
    save = str(tmp_path / "one/save")
    code, output = run_training(supervised(tmp_path, "one", "--load", save, "--num-rollout", "1"))
    assert code == 0, output
    assert "resumed" not in output
    assert steps_of(tmp_path / "one/run") == [1]
