"""What is shown of how far something is: lines with a clock, a bar on a terminal."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from sleuth.metrics.progress import Counter, ProgressDisplay, Tally


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(seconds: float, *, what: str = "") -> None:
    """A rollout of 200 trajectories, one of which is done every second, looked at every two."""
    display = ProgressDisplay("step 3: rollout", clock := Clock())
    while clock.now < seconds:
        clock.now += 2.0
        display.show(Tally(int(clock.now), 200, "trajectories", "8 in flight, 1,234 tokens/s", what))
    display.close()


def test_where_there_is_no_terminal_a_line_tells_it_every_30_seconds(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    show(95.0)
    lines = [
        f"step 3: rollout: {seconds} of 200 trajectories after {seconds} s (8 in flight, 1,234 tokens/s)"
        for seconds in (30, 60, 90)
    ]
    assert capsys.readouterr().err.splitlines() == lines
    assert [record.getMessage() for record in caplog.records] == lines


def test_what_is_shorter_prints_nothing(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    show(28.0)
    assert capsys.readouterr().err == caplog.text == ""


def test_on_a_terminal_a_bar_shows_it_and_the_log_has_the_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    show(40.0, what="evaluation of demo/greedy")
    drawn = terminal.getvalue()
    assert re.search(r"evaluation of demo/greedy: +20%\|.*\| 40 of 200 trajectories \[00:0\d, 8 in flight, 1,2", drawn)
    assert "after" not in drawn
    assert drawn.endswith("\r")  # the bar is gone
    assert caplog.messages == [
        "evaluation of demo/greedy: 30 of 200 trajectories after 30 s (8 in flight, 1,234 tokens/s)"
    ]


def test_a_counter_reports_each_and_never_more_than_all() -> None:
    counter, reported = Counter(), list[Tally]()
    counter.one_done()  # nobody listens
    counter.report = reported.append
    counter.start(2, "micro-batches trained on")
    counter.notes = "optimizer step 1 of 1"
    for _ in range(3):
        counter.one_done()
    assert [(tally.done, tally.total) for tally in reported] == [(1, 2), (2, 2), (2, 2)]
    assert {(tally.unit, tally.notes) for tally in reported} == {("micro-batches trained on", "optimizer step 1 of 1")}
