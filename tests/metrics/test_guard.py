"""A tracker that fails or hangs, at its start, in the middle or at its end, costs a run a warning and bounded time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from sleuth.metrics import guard
from sleuth.metrics.guard import Guarded


class Scripted:
    """A destination that does what `at` says where it says so: at start, in log, at the end."""

    def __init__(self, at: dict[str, Callable[[], object]]) -> None:
        self.at, self.seen = at, list[tuple[int, float]]()
        at.get("start", lambda: None)()

    def log(self, step: int, values: dict[str, float]) -> None:  # type: ignore[override]
        self.at.get("log", lambda: None)()
        self.seen.append((step, values["loss"]))

    def close(self) -> None:
        self.at.get("end", lambda: None)()


def fail() -> None:
    raise RuntimeError("the server said no\nat length")


def leave() -> None:
    raise SystemExit(3)


def hang() -> None:
    threading.Event().wait(60)


def run(at: dict[str, Callable[[], object]]) -> float:
    """Three steps with such a tracker; returns the seconds that they took."""
    start = time.monotonic()
    tracker = Guarded("here", lambda: Scripted(at), start_seconds=0.3, close_seconds=0.3)
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 0.5})
    tracker.close()
    return time.monotonic() - start


@pytest.mark.parametrize("place", ["start", "log", "end"])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        (fail, "here gets no more metrics: RuntimeError: the server said no;"),
        (leave, "here gets no more metrics: SystemExit: 3;"),
        (hang, "here gets no more metrics: it did not"),
    ],
)
def test_what_goes_wrong_is_told_once_and_takes_bounded_time(
    caplog: pytest.LogCaptureFixture, place: str, what: Callable[[], object], told: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert run({place: what}) < 10  # 0.3 s, on a machine that may be busy
    assert [record.getMessage() for record in caplog.records if told in record.getMessage()]
    assert len(caplog.records) == 1


def test_every_step_arrives_in_order_before_the_end(caplog: pytest.LogCaptureFixture) -> None:
    made = Scripted({"log": lambda: time.sleep(0.01)})
    tracker = Guarded("here", lambda: made)
    for step in range(20):
        tracker.log(step, {"loss": step / 2})
    tracker.close()
    assert made.seen == [(step, step / 2) for step in range(20)]
    assert not caplog.records


def test_a_tracker_that_hangs_does_not_fill_the_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "WAITING", 5)
    tracker = Guarded("here", lambda: Scripted({"log": hang}), close_seconds=0.1)
    for step in range(20):
        tracker.log(step, {"loss": 0.5})
    tracker.close()
    assert "here gets no more metrics: 5 steps wait for it" in caplog.text
    assert len(caplog.records) == 1
