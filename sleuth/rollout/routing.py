"""Which engine a request goes to: where its beginning lies in the prefix cache, unless that engine is much busier.

All turns of a trajectory go to one engine, and so do the first turns of a prompt's trajectories; a prompt that is new
goes to the engine with the fewest requests. Engines that fail are left out for a while. Pure bookkeeping: no HTTP.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

OUT_SECONDS = 15.0
"""How long an engine is left out after a failure, before the next request tries it again."""
MAX_HOMES = 2**16

_trajectory: ContextVar[Hashable | None] = ContextVar("sleuth_trajectory", default=None)


@contextmanager
def one_trajectory() -> Iterator[None]:
    """What is generated within belongs to one trajectory, also in tasks that are started meanwhile."""
    token = _trajectory.set(object())
    try:
        yield
    finally:
        _trajectory.reset(token)


class Router:
    """Places requests on the engines at `urls`.

    A request leaves the engine that holds its beginning for the least busy one where the two are more than `slack`
    requests apart. `clock`: seconds.
    """

    def __init__(self, urls: Sequence[str], slack: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slack, self._clock = slack, clock
        self._load = dict.fromkeys(urls, 0)
        self._out_until = dict.fromkeys(urls, 0.0)
        self._homes: OrderedDict[Hashable, str] = OrderedDict()

    @contextmanager
    def place(self, input_ids: Sequence[int]) -> Iterator[str]:
        """The engine for a request that is under way within, waiting for its turn included."""
        url = self._choose(input_ids)
        self._load[url] += 1
        try:
            yield url
        finally:
            if url in self._load:
                self._load[url] -= 1

    def use(self, urls: Sequence[str]) -> None:
        """From now on place requests on these engines; those under way stay where they are."""
        self._load = {url: self._load.get(url, 0) for url in urls}
        self._out_until = {url: self._out_until.get(url, 0.0) for url in urls}

    def failed(self, url: str) -> None:
        """Leave an engine out for a while; where all are out, all are tried."""
        if url in self._out_until:
            self._out_until[url] = self._clock() + OUT_SECONDS

    def _choose(self, input_ids: Sequence[int]) -> str:
        if len(self._load) == 1:
            return next(iter(self._load))
        now = self._clock()
        candidates = [url for url in self._load if self._out_until[url] <= now] or list(self._load)
        least = min(candidates, key=self._load.__getitem__)
        keys = self._keys(input_ids)
        homes = (self._homes.get(key) for key in keys)
        near = (url for url in homes if url in candidates and self._load[url] - self._load[least] <= self._slack)
        url = next(near, least)
        self._remember(keys, url)
        return url

    def _keys(self, input_ids: Sequence[int]) -> list[Hashable]:
        """What says where a request belongs, the strongest first: its trajectory, and for a first turn its prompt."""
        trajectory = _trajectory.get()
        if trajectory in self._homes:
            return [trajectory]
        prompt = hash(tuple(input_ids))
        return [prompt] if trajectory is None else [trajectory, prompt]

    def _remember(self, keys: Sequence[Hashable], url: str) -> None:
        for key in keys:
            self._homes[key] = url
            self._homes.move_to_end(key)
        while len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
