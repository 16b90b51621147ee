"""Watches the hooks under way from a thread of its own: a hook that blocks the event loop would keep a task from it.

It reports every second how far the rollout is, and tells, on the terminal and in the log:

* that no trajectory has finished for a minute, and what the oldest waits for, once a minute;
* which line keeps the event loop from all else, with its stack, after a few seconds; beyond `--hook-timeout` that hook
  is ended, as one that waits is.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sys import _current_frames
from typing import Any, Literal

from sleuth.activity import Activities
from sleuth.metrics.progress import Report, Tally
from sleuth.rollout.user_code import is_users
from sleuth.sample import Sample

logger = logging.getLogger(__name__)

TELL_SECONDS = 60.0
"""Between two lines about a rollout in which nothing finishes, and about an event loop that stays blocked."""
BEAT_SECONDS = 1.0
"""Between two looks at the event loop."""
BLOCKED_SECONDS = 5.0
"""An event loop that does nothing else for so long is blocked by what it runs."""
STACK_LINES = 12

Kind = Literal["generate", "reward"]


class HookBlockedError(TimeoutError):
    """Raised in a hook that has kept the event loop from all else for longer than `--hook-timeout`."""


@dataclass(slots=True)
class Call:
    """A hook that is under way."""

    kind: Kind
    sample: Sample
    task: asyncio.Task[Any] | None
    start: float
    """Seconds, of the monotonic clock."""
    activities: Activities


class Watch:
    """Of one rollout: `calls` are the hooks under way. `limit`: seconds, those of --hook-timeout.

    `report` is called in the watching thread, every second.
    """

    def __init__(self, limit: float, report: Report | None = None) -> None:
        self.limit, self.report = limit, report
        self.calls: dict[int, Call] = {}
        self.finished = self.failed = self.tokens = 0

    def ended(self, sample: Sample, *, usable: bool) -> None:
        """A trajectory is over; one that is not usable will be generated anew."""
        self.tokens += _generated(sample)
        if usable:
            self.finished += 1
        else:
            self.failed += 1

    @contextmanager
    def over(self, what: str, total: int) -> Iterator[None]:
        """Watch the running event loop, and the `total` trajectories of `what` (such as "step 3"), in the block."""
        self.finished = self.failed = self.tokens = 0
        done = threading.Event()
        watching = _Thread(self, what, total, asyncio.get_running_loop(), threading.get_ident(), done)
        threading.Thread(target=watching.run, name="rollout-watch", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def tally(self, what: str, total: int, seconds: float) -> Tally:
        """How far it is, with the tokens that the model generated, also for trajectories that failed."""
        calls = list(self.calls.values())  # another thread may change them
        tokens = self.tokens + sum(_generated(call.sample) for call in calls)
        failed = f", {self.failed} failed" if self.failed else ""
        notes = f"{len(calls)} in flight, {tokens / seconds:,.0f} tokens/s{failed}"
        return Tally(self.finished, total, "trajectories", notes, what)

    def standstill(self, what: str, seconds: float) -> str:
        """`step 3: no trajectory has finished for 60 s; oldest: ...`."""
        text = f"{what}: no trajectory has finished for {seconds:.0f} s"
        calls = list(self.calls.values())
        if not calls:
            return text
        oldest = min(calls, key=lambda call: call.start)
        age = time.monotonic() - oldest.start
        sample = f"sample {oldest.sample.index} ({oldest.sample.where}), in its {oldest.kind} hook for {age:.0f} s"
        wait = oldest.activities.oldest()
        known = f"{wait[0]} for {wait[1]:.0f} s, " if wait else ""
        return f"{text}; oldest: {known}{sample}, at {_waits_at(oldest.task)}"


@dataclass(slots=True)
class _Thread:
    """What the watching thread knows of the loop, which runs in `thread`."""

    watch: Watch
    what: str
    total: int
    loop: asyncio.AbstractEventLoop
    thread: int
    done: threading.Event

    def run(self) -> None:
        started = quiet_since = time.monotonic()
        before, tell_at = (0, 0), TELL_SECONDS
        while not self.done.wait(BEAT_SECONDS):
            counts = (self.watch.finished, self.watch.failed)
            if self._was_blocked() or counts != before:
                before, quiet_since, tell_at = counts, time.monotonic(), TELL_SECONDS
            now = time.monotonic()
            if self.watch.report is not None:
                self.watch.report(self.watch.tally(self.what, self.total, now - started))
            if now - quiet_since >= tell_at and self.watch.calls:
                tell_at += TELL_SECONDS
                logger.warning("%s", self.watch.standstill(self.what, now - quiet_since))

    def _was_blocked(self) -> bool:
        """Wait until the loop has time for something else; whether that took so long that it was told."""
        alive = threading.Event()
        try:
            self.loop.call_soon_threadsafe(alive.set)
        except RuntimeError:  # closed
            return False
        started = time.monotonic()
        tell_at, end_at = BLOCKED_SECONDS, self.watch.limit
        while not alive.wait(BEAT_SECONDS) and not self.done.is_set():
            seconds = time.monotonic() - started
            if seconds >= tell_at:
                tell_at = seconds + TELL_SECONDS
                self._tell_blocked(seconds)
            if seconds >= end_at:
                end_at = seconds + TELL_SECONDS  # the hook may catch it and go on
                _raise_in(self.thread, HookBlockedError)
        return tell_at > BLOCKED_SECONDS

    def _tell_blocked(self, seconds: float) -> None:
        frame = _current_frames().get(self.thread)
        stack = traceback.extract_stack(frame) if frame else []
        users = [entry for entry in stack if is_users(entry.filename)]
        if not stack:
            return
        place = (users or stack)[-1]
        shown = "".join(traceback.format_list((users or stack)[-STACK_LINES:]))
        logger.warning(
            "%s: for %.0f s all trajectories wait for %s:%s in %s, which blocks the event loop: use an async library "
            "there, or await asyncio.to_thread(...). Beyond --hook-timeout %g s it is ended, if it is Python that runs "
            "there. Its stack:\n%s",
            *(self.what, seconds, Path(place.filename).name, place.lineno, place.name, self.watch.limit, shown),
        )


def _generated(sample: Sample) -> int:
    """How many tokens of it the model generated so far."""
    return sum(segment.end - segment.start for segment in list(sample.trace.segments) if segment.source == "model")


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an error in the Python code that a thread runs, or when the call that it is in returns."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _waits_at(task: asyncio.Task[Any] | None) -> str:
    """The innermost line of the user's own code at which a task waits, as in `my_hook.py:12 in judge`."""
    awaited: Any = task.get_coro() if task is not None else None
    places = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    chosen = [place for place in places if is_users(place[0])] or places
    if not chosen:
        return "an unknown place"
    filename, line, function = chosen[-1]
    return f"{Path(filename).name}:{line} in {function}"
