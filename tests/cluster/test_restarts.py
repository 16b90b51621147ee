"""Which ends of a run are followed by a restart, from where, and how often."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray import exceptions

from sleuth.arguments import Args, parse_args
from sleuth.cluster import waiting
from sleuth.cluster.engines import EngineDiedError
from sleuth.cluster.progress import Progress
from sleuth.cluster.restarts import PAST, Restart, Restarts, is_loss
from sleuth.cluster.rollout_workers import RolloutWorkerDiedError
from sleuth.cluster.waiting import TookTooLongError
from sleuth.hooks.context import StopRunError
from sleuth.rollout.engine_client import EngineUnavailableError

ROOT = Path(__file__).parents[2]
SAVE = Path("save")
DIED = EngineDiedError("engine 0: killed; start again")


def in_an_actor(cause: Exception) -> Exception:
    """What `ray.get` raises for an error of a call."""
    error: Exception = exceptions.RayTaskError("train", "traceback", cause).as_instanceof_cause()
    return error


def arguments(*flags: str) -> Args:
    supervised = ("--loss-type", "sft", "--hf-checkpoint", "model", "--prompt-data", "rows.jsonl")
    return parse_args([*supervised, "--run-dir", "run", "--save", str(SAVE), "--restarts", "3", *flags])


def flags_of(again: Restart | str | None) -> list[str]:
    """What the command adds to that of this process."""
    assert isinstance(again, Restart), again
    return again.command[again.command.index("added") + 1 :]


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--load", "elsewhere", "added"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DIED, True),
        (TookTooLongError("training took longer than --train-timeout 600 s"), True),
        (exceptions.ActorDiedError(), True),
        (exceptions.WorkerCrashedError(), True),
        (in_an_actor(EngineUnavailableError("http://127.0.0.1:1 cannot be reached")), True),
        (in_an_actor(RolloutWorkerDiedError("rollout worker 1 ended")), True),
        (in_an_actor(exceptions.OwnerDiedError("id", None, "rollout")), True),
        (in_an_actor(ValueError("expected a label, found none")), False),
        (in_an_actor(StopRunError("the search does not answer")), False),
        (exceptions.RayActorError(None, "The actor died because of an error raised in its creation task"), False),
        (exceptions.OutOfDiskError("full"), False),
        (ValueError("expected 1, found 2"), False),
        (OSError(28, "No space left on device"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_only_losses_are_followed_by_a_restart(error: Exception, expected: bool) -> None:
    assert is_loss(error) == expected
    assert isinstance(Restarts().after(error, arguments()), Restart) == expected


def test_a_restart_goes_on_from_the_last_checkpoint_or_the_beginning() -> None:
    same = ["--run-dir", "run"]
    saved = Progress(5, 4, 4, SAVE)
    cases: list[tuple[Progress | None, list[str], list[str]]] = [
        (None, [], ["--load", "save", *same]),
        (None, ["--load", "elsewhere"], same),
        (Progress(1, 0, 0, None), [], ["--load", "save", *same]),
        (saved, [], ["--load", "save", *same]),
        (saved, ["--load", "elsewhere", "--finetune"], ["--load", "save", "--no-finetune", *same]),
        (Progress(6, 5, 4, Path("elsewhere"), 4), ["--load", "elsewhere"], ["--load", "elsewhere", *same]),
    ]
    for progress, given, expected in cases:
        assert flags_of(Restarts(progress=progress).after(DIED, arguments(*given))) == expected
    again = Restarts(progress=saved, count=1).after(DIED, arguments())
    assert isinstance(again, Restart)
    assert again.told == "the run is started again from step 4 of save (2 of at most 3 times)"
    unsaved = Restarts(progress=Progress(5, 4, 0, None)).after(DIED, arguments())
    assert unsaved == "--restarts 3: there is no checkpoint to start again from"
    assert Restarts(progress=saved).after(DIED, arguments("--restarts", "0")) is None


def test_restarts_end_when_all_are_used_or_two_in_a_row_did_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, better = Progress(5, 4, 4, SAVE, 4), Progress(7, 6, 6, SAVE, 4)
    found = []
    for progress in (stuck, stuck, better, stuck, None):
        restarts = Restarts.so_far()
        assert PAST not in os.environ
        restarts.progress = progress
        again = restarts.after(DIED, arguments("--restarts", "9"))
        found.append((restarts.count, restarts.fruitless, isinstance(again, Restart)))
        if isinstance(again, Restart):
            monkeypatch.setenv(PAST, again.environment[PAST])
    assert found == [(0, 0, True), (1, 0, True), (2, 1, True), (3, 0, True), (4, 1, False)]
    assert again == "--restarts 9: the last 2 ended without a new checkpoint"
    used = Restarts(count=3, progress=better).after(DIED, arguments())
    assert used == "--restarts 3: all are used"


def test_a_death_is_what_is_raised_where_others_only_miss_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Exception] = {"rank 0": in_an_actor(RuntimeError("closed by peer")), "rank 1": DIED}

    def get(references: list[str] | str) -> None:
        raise answers[references if isinstance(references, str) else references[0]]

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references, []))
    with pytest.raises(EngineDiedError):
        waiting._raise_first(["rank 0"], ["rank 1"])  # type: ignore[list-item]
    answers["rank 1"] = answers["rank 0"]
    with pytest.raises(RuntimeError, match="traceback"):
        waiting._raise_first(["rank 0"], ["rank 1"])  # type: ignore[list-item]


RUN = """
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
import train
from sleuth.checkpoints import TRACKER, saved_step
from sleuth.cluster.engines import EngineDiedError
from sleuth.cluster.progress import Progress

@contextmanager
def start_run(args, run_dir, interruption):
    done = saved_step(args.load) if args.load else 0
    yield SimpleNamespace(progress=Progress.start(done, args.load), steps_done=done, saved_on_exit=nullcontext)

def steps(args, run, tracker):
    for step in range(run.steps_done + 1, args.num_rollout + 1):
        tracker.log(step, {"resumed": run.steps_done})
        if step == 1:
            (args.save / "iter_0000001").mkdir()
            (args.save / "iter_0000001/metadata.json").write_text("{}")
            (args.save / TRACKER).write_text("1")
            run.progress.saved, run.progress.folder = 1, args.save
        elif run.steps_done == 0:
            raise EngineDiedError("engine 0: killed; start again")

train.start_run, train.train = start_run, steps
train.main()
"""


def test_the_process_goes_on_as_a_new_one_in_the_same_folders(tmp_path: Path) -> None:
    """All of `train.py` but what it starts."""
    rows, run, save = tmp_path / "rows.jsonl", tmp_path / "run", tmp_path / "save"
    rows.write_text(json.dumps({"segments": [{"text": "a", "weight": 0}, {"text": "b", "weight": 1}]}))
    flags = [
        *("--loss-type", "sft", "--hf-checkpoint", "data/demo/model", "--prompt-data", str(rows), "--num-rollout", "3"),
        *("--run-dir", str(run), "--save", str(save), "--restarts", "1"),
    ]
    ended = subprocess.run(
        [sys.executable, "-c", RUN, *flags], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = f"EngineDiedError: engine 0: killed; the run is started again from step 1 of {save} (1 of at most 1 times)\n"
    assert told in ended.stderr
    assert told in (run / "logs/driver.log").read_text()
    assert f"resumed from step 1 of {save}\n" in ended.stdout
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["resumed"]) for line in lines] == [(1, 0), (2, 1), (3, 1)]
