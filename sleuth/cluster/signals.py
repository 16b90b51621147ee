"""Makes SIGINT and SIGTERM end a run in the same way: once, with all that it started, never half-way through a save."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 60.0
"""After the first signal, work that must not stop half-way may go on for so long."""
TOGETHER_SECONDS = 2.0
"""Signals so close to the first are the same one: a script passes on the ctrl-C that its terminal sent to all."""


class Interruption:
    """What the first signal, and a second one, do.

    The first raises KeyboardInterrupt; within `held` it waits for the end of that, a second one or PATIENCE_SECONDS.
    Signals that come later are not heard: half a stop would leave engines running.
    """

    def __init__(self) -> None:
        self._came: float | None = None  # seconds, of the monotonic clock
        self._held: str | None = None
        self.gave_up = False

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Let the body finish although a signal comes, and raise KeyboardInterrupt then.

        After an interruption it may finish within what is left of the patience, and nothing more is raised.
        KeyboardInterrupt comes from inside the body where patience is over. `what` is told to who waits.
        """
        before = self._came is not None
        self._held = what
        try:
            if before:
                self._wait()
            yield
        finally:
            self._held = None
            if self._came is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
        if self._came is not None and not before:
            raise KeyboardInterrupt

    def on_signal(self, *_: object) -> None:
        """The handler of SIGINT and SIGTERM."""
        if self._came is None:
            self._came = time.monotonic()
            if self._held is None:
                raise KeyboardInterrupt
            self._wait()
        elif self._held is not None and time.monotonic() - self._came > TOGETHER_SECONDS:
            self._give_up()

    def _wait(self) -> None:
        assert self._came is not None
        left = self._came + PATIENCE_SECONDS - time.monotonic()
        if left <= 0:
            self._give_up()
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, left)
        # Not by print: a signal may come amid one, and a stream is not to be entered twice.
        os.write(2, f"\ninterrupted: {self._held} ({left:.0f} s at most; a second signal ends it)\n".encode())

    def _on_alarm(self, *_: object) -> None:
        if self._held is not None:
            self._give_up()

    def _give_up(self) -> None:
        self.gave_up, self._held = True, None
        raise KeyboardInterrupt


def end_on_signals() -> Interruption:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, also where a shell has started us in the background."""
    interruption = Interruption()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interruption.on_signal)
    return interruption
