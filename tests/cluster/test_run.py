"""How a run's steps become whole, what is saved of them when it is interrupted, and what it then says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.cluster.progress import Progress
from sleuth.cluster.run import Run
from sleuth.cluster.signals import Interruption

SAVE = Path("checkpoints")


class Sides:
    """Trainer and rollout in one: a cursor that every rollout moves on, and what was saved with which step."""

    def __init__(self) -> None:
        self.cursor = 0
        self.saved: list[tuple[int, dict[str, int]]] = []
        self.error: BaseException | None = None
        self.written = True

    def generate(self, step: int) -> Any:
        self.cursor += 4
        self._raise_if_asked("generate")
        return SimpleNamespace(shards=[])

    def train(self, step: int, shards: list[Any]) -> dict[str, float]:
        self._raise_if_asked("train")
        return {"train/loss": 1.0}

    def save(self, step: int, state: dict[str, int]) -> None:
        self._raise_if_asked("save")
        self.saved.append((step, state))

    def finish_save(self, *, wait: bool) -> bool:
        self._raise_if_asked("write")
        return self.written or wait

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def _raise_if_asked(self, where: str) -> None:
        if self.error is not None and where in str(self.error):
            raise self.error


def make_run(sides: Sides, *, save: Path | None = SAVE, on_exit: bool = True, done: int = 0) -> Run:
    args: Any = SimpleNamespace(write=lambda path: None, save=save, save_on_exit=on_exit, async_save=True)
    two: Any = sides
    return Run(args, two, two, Progress.start(done, SAVE if done else None), Interruption())


def take(run: Run, *steps: int) -> None:
    for step in steps:
        run.train(step, run.generate(step), {})


def interrupted(run: Run, sides: Sides, step: int, error: BaseException) -> str:
    """Take `step`, in which `error` is raised by the part that it names; what the interruption says."""
    sides.error = error
    try:
        with run.saved_on_exit():
            _take_or_give_up(run, sides, step)
    except KeyboardInterrupt as caught:
        return str(caught)
    return "not interrupted"


def _take_or_give_up(run: Run, sides: Sides, step: int) -> None:
    try:
        take(run, step)
    except RuntimeError:  # while the engines get their memory back, the user gives up
        sides.error = None
        raise KeyboardInterrupt from None


def test_an_interruption_in_a_rollout_saves_the_step_before_with_its_own_cursor() -> None:
    sides = Sides()
    take(run := make_run(sides), 1, 2)
    message = interrupted(run, sides, 3, KeyboardInterrupt("generate"))
    assert sides.saved == [(2, {"cursor": 8})]
    assert message == f"interrupted in step 3; step 2 is saved in {SAVE}; --load {SAVE} goes on from it"


def test_half_a_step_of_training_is_never_saved() -> None:
    for error in (KeyboardInterrupt("train"), RuntimeError("train")):
        sides = Sides()
        take(run := make_run(sides), 1)
        message = interrupted(run, sides, 2, error)
        assert sides.saved == []
        assert message == "interrupted in step 2; step 1 is not saved: there is no checkpoint"


def test_what_is_saved_is_not_saved_again() -> None:
    sides = Sides()
    take(run := make_run(sides), 1)
    run.save()
    interrupted(run, sides, 2, KeyboardInterrupt("generate"))
    assert sides.saved == [(1, {"cursor": 4})]


def test_a_checkpoint_counts_as_saved_when_it_is_written() -> None:
    sides = Sides()
    take(run := make_run(sides), 1)
    sides.written = False
    run.save()
    take(run, 2)
    assert run.progress.saved == 0
    sides.written = True
    take(run, 3)
    assert run.progress.saved == 1


@pytest.mark.parametrize("on_exit", [True, False])
def test_an_interruption_waits_for_the_checkpoint_that_is_being_written(on_exit: bool) -> None:
    sides = Sides()
    take(run := make_run(sides, on_exit=on_exit), 1)
    sides.written = False
    run.save()
    message = interrupted(run, sides, 2, KeyboardInterrupt("generate"))
    assert sides.saved == [(1, {"cursor": 4})]
    assert f"step 1 is saved in {SAVE}" in message


def test_the_next_save_waits_for_the_one_before() -> None:
    sides = Sides()
    take(run := make_run(sides), 1)
    sides.written = False
    run.save()
    take(run, 2)
    run.save()
    assert (run.progress.saved, run._saving) == (1, 2)
    run.finish_save()
    assert (run.progress.saved, run._saving) == (2, None)


def test_a_run_that_fails_publishes_the_checkpoint_that_is_being_written() -> None:
    sides = Sides()
    take(run := make_run(sides), 1)
    sides.written = False
    run.save()
    with pytest.raises(RuntimeError, match="an engine died"), run.saved_on_exit():
        raise RuntimeError("an engine died")
    assert run.progress.saved == 1


def test_a_write_that_fails_ends_the_run() -> None:
    sides = Sides()
    take(run := make_run(sides), 1)
    run.save()
    sides.error = OSError("write: the disk is full")
    with pytest.raises(OSError, match="the disk is full"), run.saved_on_exit():
        take(run, 2)
    assert run.progress.saved == 0


@pytest.mark.parametrize(("save", "on_exit"), [(None, True), (SAVE, False)])
def test_nothing_is_saved_on_exit_where_it_is_not_asked_for(save: Path | None, on_exit: bool) -> None:
    sides = Sides()
    take(run := make_run(sides, save=save, on_exit=on_exit, done=4), 5, 6)
    message = interrupted(run, sides, 7, KeyboardInterrupt("generate"))
    assert sides.saved == []
    assert message == (
        "interrupted in step 7; steps 5 and 6 are not saved: the last checkpoint is step 4 of checkpoints; "
        "--load checkpoints goes on from it"
    )


def test_a_save_that_fails_leaves_the_last_checkpoint_named() -> None:
    sides = Sides()
    take(run := make_run(sides, done=4), 5, 6, 7)
    run.generate(8)
    sides.error = OSError("save: no space left")
    with pytest.raises(KeyboardInterrupt, match="steps 5 to 7 are not saved: the last checkpoint is step 4 of"):  # noqa: SIM117
        with run.saved_on_exit():
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        (Progress(0, 0, 0, None), "interrupted before step 1; no step is done, and there is no checkpoint"),
        (Progress(1, 0, 0, None), "interrupted in step 1; no step is done, and there is no checkpoint"),
        (
            Progress(4, 4, 4, SAVE),
            f"interrupted after step 4; step 4 is saved in {SAVE}; --load {SAVE} goes on from it",
        ),
        (Progress(3, 3, 0, None), "interrupted after step 3; steps 1 to 3 are not saved: there is no checkpoint"),
    ],
)
def test_what_an_interruption_says(progress: Progress, message: str) -> None:
    assert progress.interrupted() == message
