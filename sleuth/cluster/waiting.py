"""Waits for answers of a run's actors, and tells what a long wait is for: no call of the driver waits without an end.

Where the actor notes how far it is, that is shown (`sleuth.metrics.progress`); else a line tells every minute how long
the wait has taken. Beside it the processes of the run are looked at, every 20 s: what is wrong with one is told at
once, then every minute. Beyond its limit the wait ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import ray

from sleuth.cluster.board import Board
from sleuth.metrics.progress import ProgressDisplay
from sleuth.processes import ProcessName

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
LOOK_SECONDS = 20.0
TELL_SECONDS = 60.0
DEATH_SECONDS = 5.0
"""Ray tells of an actor's death a little later than the actors that were connected to it."""


class TookTooLongError(RuntimeError):
    """What was waited for did not come within its limit."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What is waited for (such as "step 3: training"), and at most how many seconds, by which flag.

    `board`: where the actor notes how far it is.
    """

    what: str
    limit: float | None = None
    flag: str = ""
    board: Board | None = None


@dataclass(slots=True)
class Watched:
    """A process of the run, and what it is called."""

    name: str
    process: ProcessName

    def trouble(self) -> str | None:
        """What is wrong with it, if that can be seen from here."""
        if not self.process.is_stopped():
            return None
        pid = self.process.pid
        return f"{self.name} (process {pid}) is stopped (SIGSTOP; `kill -CONT {pid}` lets it go on)"


class Waiter:
    """Waits for a run's actors. `looks` say what is wrong with its processes; none may wait itself.

    One that raises an error ends the wait.
    """

    def __init__(self, looks: Sequence[Callable[[], list[str]]] = ()) -> None:
        self.looks = list(looks)
        self.prefix = ""
        """What the waits are part of, such as "step 3: "."""

    def watch(self, name: str, process: ProcessName) -> None:
        """Look at a process from now on."""
        watched = Watched(name, process)
        self.looks.append(lambda: [trouble] if (trouble := watched.trouble()) else [])

    def get(
        self, references: Sequence[ray.ObjectRef], wait: Wait, meanwhile: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """As ray.get of all `references`; TookTooLongError beyond the limit of `wait`.

        `meanwhile` is done every few seconds.
        """
        line = _Line(f"{self.prefix}{wait.what}", wait)
        pending = list(references)
        with closing(line):
            while pending:
                done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
                if done:
                    _raise_first(done, pending)  # at once, though others may wait for ever
                if pending:
                    line.tell(self.troubles)
                    meanwhile()
        return ray.get(list(references))

    def one(self, reference: ray.ObjectRef, wait: Wait, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """As `get`, for a single reference."""
        return self.get([reference], wait, meanwhile)[0]

    def troubles(self) -> list[str]:
        return [trouble for look in self.looks for trouble in look()]


def _raise_first(done: Sequence[ray.ObjectRef], pending: Sequence[ray.ObjectRef]) -> None:
    """Raise what one of `done` raised, if any did; where an actor died, that, for others then miss its answers."""
    try:
        ray.get(list(done))
    except ray.exceptions.RayTaskError:
        ended, _ = ray.wait([*done, *pending], num_returns=len(done) + len(pending), timeout=DEATH_SECONDS)
        for reference in ended:
            with suppress(ray.exceptions.RayTaskError):
                ray.get(reference)
        raise


class _Line:
    """When there is something to tell of a wait. `clock`: seconds."""

    def __init__(self, what: str, wait: Wait, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._wait, self._clock = what, wait, clock
        self._started = clock()
        self._display = ProgressDisplay(what, clock)
        if wait.board is not None:
            wait.board.clear()
        self._next_look, self._next_line = LOOK_SECONDS, TELL_SECONDS
        self._known: list[str] = []

    def tell(self, troubles: Callable[[], list[str]]) -> None:
        """Show and log what there is to tell; TookTooLongError beyond the limit."""
        tally = None if self._wait.board is None else self._wait.board.read()
        if tally is not None:
            self._display.show(tally)
        seconds = self._clock() - self._started
        if self._wait.limit is not None and seconds >= self._wait.limit:
            found = troubles()
            raise TookTooLongError(
                f"{self._what} took longer than {self._wait.flag} {self._wait.limit:g} s"
                + (f": {'; '.join(found)}" if found else "; the logs of the processes may say why")
                + ". Raise the limit if it was only slow"
            )
        if seconds < self._next_look:
            return
        self._next_look = seconds + LOOK_SECONDS
        found = troubles()
        due = seconds >= self._next_line
        if (due and (tally is None or found)) or (found and found != self._known):
            limit = f" ({self._wait.flag} {self._wait.limit:g} s)" if self._wait.limit is not None else ""
            logger.warning("%s: %.0f s so far%s%s", self._what, seconds, limit, "".join(f"; {t}" for t in found))
        if due:
            self._next_line = seconds - seconds % TELL_SECONDS + TELL_SECONDS
        self._known = found

    def close(self) -> None:
        """Take away what shows only while it is waited."""
        self._display.close()
