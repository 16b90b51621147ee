"""When a process of a run is started again, and how often. Pure bookkeeping: no Ray."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable

SILENT_SECONDS = 120.0
"""A process that runs, but has been stopped or silent for so long, is taken for lost."""


class Lives:
    """Of several processes: each may be started again `allowed` times. `clock`: seconds."""

    def __init__(self, allowed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.allowed = allowed
        self._clock = clock
        self._used: Counter[Hashable] = Counter()
        self._silent_since: dict[Hashable, float] = {}

    def is_lost(self, process: Hashable, *, runs: bool, trouble: str | None) -> bool:
        """Note how a process is; whether it has ended, or has been in trouble for too long to wait on."""
        if trouble is None:
            self._silent_since.pop(process, None)
            return False
        since = self._silent_since.setdefault(process, self._clock())
        return not runs or self._clock() - since >= SILENT_SECONDS

    def use(self, process: Hashable) -> int | None:
        """Start it again: the how-manieth time that is; None if it may not be."""
        if self._used[process] >= self.allowed:
            return None
        self._used[process] += 1
        self._silent_since.pop(process, None)
        return self._used[process]
