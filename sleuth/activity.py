"""What a trajectory waits for just now, so that a line about a long wait can say it.

    with waiting_for(f"search at {url}"):
        answer = await ...

Whoever talks to a service says so; whoever runs the trajectory reads it. Outside of a trajectory nothing is noted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Activities:
    """The waits of one trajectory that are under way; its own tasks share it."""

    def __init__(self) -> None:
        self._waits: dict[object, tuple[str, float]] = {}

    def oldest(self) -> tuple[str, float] | None:
        """What is waited for the longest, and for how many seconds; None if nothing that is known."""
        waits = list(self._waits.values())  # another thread may ask
        if not waits:
            return None
        what, since = min(waits, key=lambda wait: wait[1])
        return what, time.monotonic() - since

    @contextmanager
    def add(self, what: str) -> Iterator[None]:
        key = object()
        self._waits[key] = (what, time.monotonic())
        try:
            yield
        finally:
            del self._waits[key]


_activities: ContextVar[Activities | None] = ContextVar("sleuth_activities", default=None)


@contextmanager
def noted() -> Iterator[Activities]:
    """Note the waits within, also those of tasks that are started meanwhile."""
    activities = Activities()
    token = _activities.set(activities)
    try:
        yield activities
    finally:
        _activities.reset(token)


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Within, the trajectory that runs here waits for `what`."""
    activities = _activities.get()
    if activities is None:
        yield
        return
    with activities.add(what):
        yield
