"""Dynamic micro-batching: one thread encodes and searches together what many clients ask at the same time.

Whenever the thread is free, it takes all queries in the queue, so batches grow with the load, and a single client never
waits for others (unless `max_wait_seconds` says so). Under load the thread waits for the clients that it has just
answered, because most of them ask again at once: otherwise the clients would form two groups that take turns, and
batches would be half as large. Equal queries of several clients are searched once. When a client goes away, its
queries leave the queue. A failing search affects only its own batch.

This module knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cachetools import LRUCache

from local_dense_retriever.metrics import Metrics
from local_dense_retriever.retrievers import Retriever

logger = logging.getLogger(__name__)

RETURN_SHARE = 1 / 6
"""Of the time that a batch took: how long its clients are waited for, at most, to ask again."""


class Hit(NamedTuple):
    """A passage as JSON, and how well it matches."""

    document: bytes
    score: float


class QueueFullError(RuntimeError):
    """The queue is full; later there may be room again."""


class SearchFailedError(RuntimeError):
    """The retriever raised."""


class BatchingConfig(NamedTuple):
    """How queries are gathered into batches."""

    max_batch_size: int = 64
    max_wait_seconds: float = 0.0
    """How long the oldest query may wait for its batch to fill while the thread is idle."""
    max_queue: int = 4096
    """Distinct queries that may wait."""
    cache_size: int = 10_000
    """How many queries' results are kept; 0: none. One with more than `cached_topk` results counts several times."""
    cached_topk: int = 3


class Batcher:
    """Searches for many clients of one event loop.

    `fetch(index)` returns a passage of the corpus as JSON. One thread calls it, `retriever.encode` and
    `retriever.search`.
    """

    def __init__(
        self, retriever: Retriever, fetch: Callable[[int], bytes], config: BatchingConfig, metrics: Metrics
    ) -> None:
        self._retriever, self._fetch, self._config, self._metrics = retriever, fetch, config, metrics
        self._queued: dict[str, _Query] = {}  # in the order of arrival
        self._running: dict[str, _Query] = {}
        self._changed = threading.Condition()  # guards both
        self._closing = False
        self._cache: LRUCache[str, _Known] = LRUCache(config.cache_size, getsizeof=self._cache_share)
        self._thread = threading.Thread(target=self._work, name="search", daemon=True)
        metrics.watch_queue(lambda: len(self._queued))

    def start(self) -> None:
        """Start the thread that searches. Call it in the event loop whose requests it answers."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Finish the accepted searches, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages for each query, at most `topk`.

        Raises QueueFullError before anything is queued, SearchFailedError if the retriever raised. If the task is
        cancelled, its queries are dropped unless others wait for them.
        """
        request = _Request(len(queries), self._loop.create_future())
        missing = self._look_up(request, queries, topk)
        if missing:
            self._enqueue(request, missing, topk)
            try:
                await request.done
            except asyncio.CancelledError:
                self._abandon(request, missing)
                raise
        return [hits[:topk] for hits in request.results]

    # --- in the event loop ---

    def _look_up(self, request: _Request, queries: Sequence[str], topk: int) -> dict[str, list[int]]:
        """Fill in cached results; return the other queries, each with its places in the request."""
        missing: dict[str, list[int]] = {}
        hits = 0
        for place, query in enumerate(queries):
            known = self._cache.get(query)
            if known is not None and (known.topk >= topk or len(known.hits) < known.topk):
                request.results[place] = known.hits
                hits += 1
            else:
                missing.setdefault(query, []).append(place)
        if hits:
            self._metrics.cache_hits.inc(hits)
        if missing:
            self._metrics.cache_misses.inc(len(queries) - hits)
        return missing

    def _enqueue(self, request: _Request, missing: dict[str, list[int]], topk: int) -> None:
        now = time.perf_counter()
        with self._changed:
            under_way = {query: self._under_way(query, topk) for query in missing}
            new = sum(query is None for query in under_way.values())
            if len(self._queued) + new > self._config.max_queue:
                raise QueueFullError(f"{len(self._queued)} queries wait already; at most {self._config.max_queue} may")
            for text, places in missing.items():
                query = under_way[text]
                if query is None:
                    query = self._queued[text] = _Query(text, now)
                query.topk = max(query.topk, topk)
                query.waiting.append((request, places))
            self._changed.notify()
        request.missing = len(missing)
        if new < len(missing):
            self._metrics.joined.inc(len(missing) - new)

    def _under_way(self, text: str, topk: int) -> _Query | None:
        """An equal query that waits or is being searched, for at least as many passages; None if there is none."""
        if text in self._queued:
            return self._queued[text]
        running = self._running.get(text)
        return running if running is not None and running.topk >= topk else None

    def _abandon(self, request: _Request, missing: dict[str, list[int]]) -> None:
        dropped = 0
        with self._changed:
            for text in missing:
                for queries in (self._queued, self._running):
                    if (query := queries.get(text)) is not None:
                        query.waiting = [waiting for waiting in query.waiting if waiting[0] is not request]
                if text in self._queued and not self._queued[text].waiting:
                    del self._queued[text]
                    dropped += 1
        if dropped:
            self._metrics.abandoned.inc(dropped)

    def _deliver(self, batch: Sequence[_Query], found: Sequence[list[Hit]]) -> None:
        self._forget(batch)
        for query, hits in zip(batch, found, strict=True):
            self._remember(query, hits)
            for request, places in query.waiting:
                for place in places:
                    request.results[place] = hits
                request.missing -= 1
                if not request.missing and not request.done.done():
                    request.done.set_result(None)

    def _fail(self, batch: Sequence[_Query], error: Exception) -> None:
        self._forget(batch)
        for query in batch:
            for request, _ in query.waiting:
                if not request.done.done():
                    request.done.set_exception(SearchFailedError(f"{type(error).__name__}: {error}"))

    def _forget(self, batch: Sequence[_Query]) -> None:
        with self._changed:
            for query in batch:
                if self._running.get(query.text) is query:
                    del self._running[query.text]

    def _remember(self, query: _Query, hits: list[Hit]) -> None:
        known = _Known(query.topk, hits)
        if self._cache_share(known) <= self._cache.maxsize:
            self._cache[query.text] = known

    def _cache_share(self, known: _Known) -> int:
        return max(1, math.ceil(len(known.hits) / self._config.cached_topk))

    # --- in the thread ---

    def _work(self) -> None:
        while batch := self._take():
            start = time.perf_counter()
            try:
                found = self._search(batch)
            except Exception as error:
                logger.exception("the search of %d queries failed", len(batch))
                self._metrics.failures.inc()
                answer: Callable[[], None] = functools.partial(self._fail, batch, error)
            else:
                answer = functools.partial(self._deliver, batch, found)
            returning = len(batch) - len(batch) // 8  # not the last ones, or all would wait for a few
            enough = min(len(self._queued) + returning, self._config.max_batch_size)  # before the first one returns
            self._loop.call_soon_threadsafe(answer)
            self._wait_for_queries(enough, RETURN_SHARE * (time.perf_counter() - start))

    def _wait_for_queries(self, enough: int, seconds: float) -> None:
        """Wait, for at most `seconds`, for the clients that have just been answered to ask again."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or len(self._queued) >= enough, seconds)

    def _take(self) -> list[_Query]:
        """The next batch, as soon as there is one; empty once the batcher is closed and nothing is left."""
        with self._changed:
            while not self._queued and not self._closing:
                self._changed.wait()
                if self._config.max_wait_seconds > 0:
                    self._wait_for_more()  # all may be withdrawn meanwhile
            batch = list(self._queued.values())[: self._config.max_batch_size]
            for query in batch:
                del self._queued[query.text]
                self._running[query.text] = query
        now = time.perf_counter()
        for query in batch:
            self._metrics.queue_seconds.observe(now - query.queued_at)
        return batch

    def _wait_for_more(self) -> None:
        while not self._closing and 0 < len(self._queued) < self._config.max_batch_size:
            oldest = next(iter(self._queued.values()))
            left = oldest.queued_at + self._config.max_wait_seconds - time.perf_counter()
            if left <= 0 or not self._changed.wait(left):
                break

    def _search(self, batch: Sequence[_Query]) -> list[list[Hit]]:
        metrics = self._metrics
        metrics.batch_size.observe(len(batch))
        with metrics.encode_seconds.time():
            encoded = self._retriever.encode([query.text for query in batch])
        with metrics.search_seconds.time():
            ranked = self._retriever.search(encoded, max(query.topk for query in batch))
        with metrics.fetch_seconds.time():
            return [
                [Hit(self._fetch(index), score) for index, score in found[: query.topk]]
                for query, found in zip(batch, ranked, strict=True)
            ]


class _Request:
    """The queries of one client, and the results so far."""

    __slots__ = ("done", "missing", "results")

    def __init__(self, size: int, done: asyncio.Future[None]) -> None:
        self.results: list[list[Hit]] = [[]] * size
        self.missing = 0  # distinct queries
        self.done = done


class _Query:
    """A query under way, and the requests that wait for it, with its places in them."""

    __slots__ = ("queued_at", "text", "topk", "waiting")

    def __init__(self, text: str, queued_at: float) -> None:
        self.text, self.queued_at = text, queued_at
        self.topk = 0
        self.waiting: list[tuple[_Request, list[int]]] = []


class _Known(NamedTuple):
    topk: int
    hits: list[Hit]
