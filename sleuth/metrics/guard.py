"""Keeps a run going whatever a tracker does: each has a thread of its own, and is given up if it fails or hangs."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""W&B alone allows 90 for reaching its server."""
CLOSE_SECONDS = 60.0
WAITING = 10_000
"""Steps that may wait for a tracker before it is given up."""


class Destination(Protocol):
    """Where metrics go: one of these for each tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take metrics of a step, which may come in parts."""

    def close(self) -> None:
        """Finish; nothing is logged afterwards."""


class Guarded:
    """A destination that never raises, and never holds up a run for longer than its bounds (seconds).

    What goes wrong is told once, in a warning; the run then goes on without this destination.
    """

    def __init__(
        self,
        name: str,
        open_destination: Callable[[], Destination],
        *,
        start_seconds: float = START_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._name, self._close_seconds = name, close_seconds
        self._steps: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(WAITING)
        self._started, self._ended = threading.Event(), threading.Event()
        self._given_up = False
        # A daemon: Python does not wait for it at the end.
        thread = threading.Thread(target=self._work, args=(open_destination,), name=f"tracker-{name}", daemon=True)
        thread.start()
        if not self._started.wait(start_seconds):
            self._give_up(f"it did not start within {start_seconds:.0f} s")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if not self._given_up:
            try:
                self._steps.put_nowait((step, dict(values)))
            except queue.Full:
                self._give_up(f"{WAITING} steps wait for it")

    def close(self) -> None:
        if self._given_up:
            return
        try:
            self._steps.put_nowait(None)
        except queue.Full:
            self._give_up(f"{WAITING} steps wait for it")
        if not self._ended.wait(self._close_seconds):
            self._give_up(f"it did not finish within {self._close_seconds:.0f} s, and may lack the last steps")

    def _work(self, open_destination: Callable[[], Destination]) -> None:
        try:
            destination = open_destination()
            self._started.set()
            while (entry := self._steps.get()) is not None:
                destination.log(*entry)
            destination.close()
        except BaseException as error:  # a library may even call sys.exit
            reason = str(error).strip().partition("\n")[0]
            self._give_up(f"{type(error).__name__}: {reason:.300}" if reason else type(error).__name__)
            logger.info("%s failed", self._name, exc_info=True)
        finally:
            self._started.set()
            self._ended.set()

    def _give_up(self, reason: str) -> None:
        if not self._given_up:
            self._given_up = True
            logger.warning(
                "%s gets no more metrics: %s; the run goes on, and metrics.jsonl has them all", self._name, reason
            )
