"""How far a rollout, an evaluation or a step's training is, for whoever waits: a bar on a terminal, else lines.

Who does the work makes a `Tally` every now and then; who waits gives each to a `ProgressDisplay`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

LINE_SECONDS = 30.0
"""Between two lines; what takes less time has none."""
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} {unit} [{elapsed}{postfix}]"


@dataclass(frozen=True, slots=True)
class Tally:
    """How much is done: `done` of `total` things called `unit`. `notes` stand in brackets.

    `what` names the work, such as "step 3"; where it is empty, whoever waits gives the name.
    """

    done: int
    total: int
    unit: str
    notes: str = ""
    what: str = ""


Report = Callable[[Tally], None]


class Counter:
    """Counts what is done of a total, and reports each."""

    def __init__(self) -> None:
        self.report: Report = lambda tally: None
        self.notes = ""
        self._done, self._total, self._unit = 0, 0, ""

    def start(self, total: int, unit: str) -> None:
        """Count anew, up to `total` things called `unit`."""
        self._done, self._total, self._unit, self.notes = 0, total, unit, ""

    def one_done(self) -> None:
        self._done = min(self._done + 1, self._total)
        self.report(Tally(self._done, self._total, self._unit, self.notes))


class ProgressDisplay:
    """Shows the tallies of one wait. On a terminal it is a bar, which is gone at the end; the log gets the lines, too.

    `what` is waited for; `clock`: seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._started = clock()
        self._next_line = LINE_SECONDS
        self._bar: tqdm[Any] | None = None

    def show(self, tally: Tally) -> None:
        what, seconds = tally.what or self._what, self._clock() - self._started
        on_terminal = sys.stderr.isatty()
        if on_terminal:
            self._draw(what, tally)
        if seconds < self._next_line:
            return
        self._next_line = seconds - seconds % LINE_SECONDS + LINE_SECONDS
        notes = f" ({tally.notes})" if tally.notes else ""
        line = f"{what}: {tally.done} of {tally.total} {tally.unit} after {seconds:.0f} s{notes}"
        logger.info(line)
        if not on_terminal:
            tqdm.write(line, file=sys.stderr)

    def _draw(self, what: str, tally: Tally) -> None:
        if self._bar is None:
            self._bar = tqdm(leave=False, dynamic_ncols=True, bar_format=BAR)
        bar = self._bar
        bar.total, bar.n, bar.unit = tally.total, tally.done, tally.unit
        bar.set_description_str(what, refresh=False)
        bar.set_postfix_str(tally.notes, refresh=False)
        bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
