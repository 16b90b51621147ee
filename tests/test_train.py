"""The order of things in the loop, with a run that only notes what it is asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import train
from sleuth.arguments import Args, parse_args
from sleuth.checkpoints import TRACKER
from sleuth.cluster.progress import Progress
from sleuth.cluster.run import Run
from sleuth.cluster.signals import Interruption


class Noting:
    """Takes part as trainer, rollout and tracker; `done` says what was asked for in which step."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.step = 0

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any) -> Any:
            self.step = args[0] if name == "generate" else self.step
            self.done.append(f"{name} {self.step}")
            return SimpleNamespace(shards=[], metrics={}) if name == "generate" else {}

        return note


@pytest.mark.parametrize(
    ("interval", "evaluation", "synced"),
    [(1, None, [0, 1, 2, 3, 4, 5]), (2, None, [0, 2, 4, 5]), (4, 3, [0, 3, 4, 5]), (9, None, [0, 5])],
)
def test_weights_go_to_the_engines_at_intervals_before_evaluations_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, interval: int, evaluation: int | None, synced: list[int]
) -> None:
    args: Any = SimpleNamespace(
        num_rollout=5,
        eval_before_train=False,
        eval_interval=evaluation,
        update_weights_interval=interval,
        save=None,
        save_on_exit=True,
        async_save=True,
        save_interval=1,
        max_logprob_diff=None,
    )
    noting: Any = Noting()
    monkeypatch.setattr(train, "sync_weights", lambda *args, max_difference: noting.sync_weights(args[2]))
    run: Any = Run(args, noting, noting, Progress.start(0, None), Interruption())
    train.train(args, run, noting)
    assert [entry for entry in noting.done if entry.startswith("sync")] == [f"sync_weights {step}" for step in synced]
    for step in {3, 5} if evaluation else ():
        assert noting.done.index(f"sync_weights {step}") < noting.done.index(f"evaluate {step}")


def arguments(*flags: str) -> Args:
    supervised = ("--loss-type", "sft", "--hf-checkpoint", "model", "--prompt-data", "rows.jsonl")
    return parse_args([*supervised, *flags])


def checkpoint(folder: Path, step: int) -> Path:
    (folder / f"iter_{step:07d}").mkdir(parents=True)
    (folder / f"iter_{step:07d}/metadata.json").write_text("{}")
    (folder / TRACKER).write_text(str(step))
    return folder


@pytest.mark.parametrize(("steps", "code"), [(40, 0), (39, 2), (41, None)])
def test_a_run_that_is_done_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, code: int | None
) -> None:
    folder = checkpoint(tmp_path / "saved", 40)
    for load in (folder, folder / "iter_0000040"):
        args = arguments("--load", str(load), "--save", str(folder), "--num-rollout", str(steps))
        if code is None:
            train.exit_if_done(args)
            continue
        with pytest.raises(SystemExit) as stopped:
            train.exit_if_done(args)
        assert stopped.value.code == code
        said = "".join(capsys.readouterr())
        assert f"the checkpoint in {load} holds step 40" in said
        assert "raise --num-rollout" in said
        assert said.count("\n") == 1
    train.exit_if_done(args.model_copy(update={"finetune": True}))


def test_an_empty_folder_to_resume_from_has_nothing_done(tmp_path: Path) -> None:
    for load in (tmp_path, tmp_path / "missing"):
        train.exit_if_done(arguments("--load", str(load), "--save", str(load), "--num-rollout", "1"))
    (tmp_path / TRACKER).write_text("4")  # names what is not there, which the check of files tells
    train.exit_if_done(arguments("--load", str(tmp_path), "--num-rollout", "4"))


def test_where_a_run_starts_from_is_told_unless_it_is_new() -> None:
    assert train.origin(arguments("--load", "d", "--save", "d"), 0) is None
    assert train.origin(arguments("--load", "d"), 4) == "resumed from step 4 of d"
    assert train.origin(arguments("--load", "d", "--finetune"), 0) == "starting from the weights of d (--finetune)"
