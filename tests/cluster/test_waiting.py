"""What is told of a long wait and when it ends: with a clock, and with stopped processes."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray

from sleuth.cluster import waiting
from sleuth.cluster.board import Board
from sleuth.cluster.waiting import TookTooLongError, Wait, Waiter, Watched
from sleuth.metrics.progress import Tally
from sleuth.processes import ProcessName

TRAINING = Wait("training", 600.0, "--train-timeout")


class Wall:
    """A clock, and what is wrong with the run from second to second."""

    def __init__(self, **troubles: tuple[float, float]) -> None:
        self.now, self._troubles, self.looks = 0.0, troubles, 0

    def troubles(self) -> list[str]:
        self.looks += 1
        return [name for name, (first, last) in self._troubles.items() if first <= self.now < last]


def lines(wall: Wall, wait: Wait, seconds: float, caplog: pytest.LogCaptureFixture) -> list[str]:
    line = waiting._Line(f"step 3: {wait.what}", wait, lambda: wall.now)
    while wall.now < seconds:
        wall.now += 2.0
        line.tell(wall.troubles)
    return [record.getMessage() for record in caplog.records]


def test_a_long_wait_is_told_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    told = lines(Wall(), TRAINING, 190.0, caplog)
    assert told == [f"step 3: training: {seconds} s so far (--train-timeout 600 s)" for seconds in (60, 120, 180)]


def test_a_short_wait_is_not(caplog: pytest.LogCaptureFixture) -> None:
    wall = Wall()
    assert lines(wall, TRAINING, 18.0, caplog) == []
    assert wall.looks == 0


class Noted(Board):
    """A board on which a tally stands."""

    def __init__(self, tally: Tally | None) -> None:
        self.tally = tally

    def read(self) -> Tally | None:
        return self.tally

    def clear(self) -> None: ...


def test_how_far_it_is_takes_the_place_of_the_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tally = Tally(4, 9, "micro-batches trained on", "optimizer step 1 of 2")
    told = lines(Wall(), replace(TRAINING, board=Noted(tally)), 70.0, caplog)
    assert told == [
        f"step 3: training: 4 of 9 micro-batches trained on after {seconds} s (optimizer step 1 of 2)"
        for seconds in (30, 60)
    ]
    caplog.clear()
    told = lines(Wall(), replace(TRAINING, board=Noted(None)), 70.0, caplog)
    assert told == ["step 3: training: 60 s so far (--train-timeout 600 s)"]


def test_what_is_wrong_is_told_at_once_and_then_with_the_minutes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tally = Tally(4, 9, "trajectories")
    told = lines(Wall(stuck=(0.0, 130.0)), Wait("rollout", board=Noted(tally)), 300.0, caplog)
    assert told == [f"step 3: rollout: {seconds} s so far; stuck" for seconds in (20, 60, 120)]


def test_beyond_its_limit_a_wait_ends_the_run_and_says_what_was_wrong(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TookTooLongError, match=r"^step 3: training took longer than --train-timeout 600 s: stuck\. R"):
        lines(Wall(stuck=(0.0, 1e9)), TRAINING, 700.0, caplog)
    with pytest.raises(TookTooLongError, match=r"600 s; the logs of the processes may say why\. Raise the limit if"):
        lines(Wall(), TRAINING, 700.0, caplog)


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield psutil.Process(started.pid)
        started.kill()


def test_a_stopped_process_is_noticed(process: psutil.Process) -> None:
    watched = Watched("trainer rank 1", ProcessName.of(process.pid))
    assert watched.trouble() is None
    process.suspend()
    deadline = time.monotonic() + 30
    while watched.trouble() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watched.trouble() == (
        f"trainer rank 1 (process {process.pid}) is stopped (SIGSTOP; `kill -CONT {process.pid}` lets it go on)"
    )
    process.resume()
    process.kill()
    process.wait()
    assert watched.trouble() is None  # Ray tells of the dead


def test_an_error_is_raised_though_others_still_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(references: list[Any]) -> list[Any]:
        raise ValueError(f"of {references}")

    monkeypatch.setattr(ray, "wait", lambda pending, num_returns, timeout: (pending[:1], pending[1:]))
    monkeypatch.setattr(ray, "get", get)
    references: list[Any] = ["rank 0", "rank 1"]
    with pytest.raises(ValueError, match="rank 0"):
        Waiter().get(references, TRAINING)


def test_the_meanwhile_is_done_while_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [["a"], ["a"], []]
    monkeypatch.setattr(
        ray, "wait", lambda pending, num_returns, timeout: ([], pending) if missing.pop(0) else (pending, [])
    )
    monkeypatch.setattr(ray, "get", lambda references: references)
    done: list[int] = []
    reference: Any = "a"
    assert Waiter().one(reference, TRAINING, lambda: done.append(1)) == "a"
    assert done == [1, 1]
