"""Protects a search backend under load: bounds and counts requests, joins equal ones, and gives up if it is down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sleuth.activity import waiting_for
from sleuth.hooks.context import StopRunError, share_of, step_metrics
from sleuth.search.http import QueryError, SearchError, clean_query, is_query_fault, with_search_retries
from sleuth.search.observation import Passage, to_passage

logger = logging.getLogger(__name__)

WINDOW = 200
"""Over how many of the last searches the failure rate is taken."""
FEWEST = 20
"""Fewer searches than this do not tell a rate."""


Backend = Callable[[str], Awaitable[Sequence[Any]]]
"""What searches for one query."""


class SearchUnavailableError(StopRunError):
    """So many searches failed that the backend is considered down; ends the run."""


class SearchService:
    """Searches through `backend(query)`; use one per event loop.

    At most `concurrency` searches are under way at once, in all processes of the hooks together. A query that is
    already under way is not sent again: both callers get the same result. The last `cache_size` results are kept.
    Once more than `max_failure_rate` of the last searches have failed, the next failure is a SearchUnavailableError.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        concurrency: int,
        cache_size: int = 0,
        max_failure_rate: float = 1.0,
    ) -> None:
        self._backend = backend
        self._places = asyncio.Semaphore(share_of(concurrency))
        self._cache_size = cache_size
        self._max_failure_rate = max_failure_rate
        self._under_way: dict[str, asyncio.Future[list[Passage]]] = {}
        self._cache: OrderedDict[str, list[Passage]] = OrderedDict()
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._answered = self._refused = 0

    async def search(self, query: str) -> list[Passage]:
        """The passages for the query.

        Raises QueryError if the query itself was refused, SearchError if the search failed, SearchUnavailableError
        once too many searches have failed.
        """
        if query in self._cache:
            self._cache.move_to_end(query)
            _statistics.count("cache_hits")
            return self._cache[query]
        while (under_way := self._under_way.get(query)) is not None:
            _statistics.count("joined")
            with waiting_for("search for the same query by another trajectory"):
                await asyncio.wait([under_way])
            if not under_way.cancelled():
                return under_way.result()
            # Whoever asked was cancelled; one of those who waited asks again.
        return await self._ask(query)

    async def _ask(self, query: str) -> list[Passage]:
        """Search for the caller, and for all who ask for the same query meanwhile."""
        future = self._under_way[query] = asyncio.get_running_loop().create_future()
        try:
            passages = await self._search(query)
            future.set_result(passages)
        except Exception as error:
            future.set_exception(error)
            future.exception()  # seen, also where nobody else waits
            raise
        finally:
            future.cancel()  # if it is not done
            del self._under_way[query]
        return passages

    async def _search(self, query: str) -> list[Passage]:
        async with self._places:
            start = time.perf_counter()
            try:
                passages = _passages(await self._backend(query))
            except QueryError as error:
                _statistics.record("query", time.perf_counter() - start)
                self._refused += 1
                self._check_refusals(error)
                raise
            except SearchError as error:
                _statistics.record(error.kind, time.perf_counter() - start)
                self._failed.append(True)
                self._check_rate(error)
                raise
            _statistics.record("success", time.perf_counter() - start)
            self._failed.append(False)
            self._answered += 1
        if self._cache_size:
            self._cache[query] = passages
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return passages

    def _check_refusals(self, error: QueryError) -> None:
        """Treat the backend as down if it refuses every query, even though each refusal blames the query."""
        if self._answered == 0 and self._refused >= FEWEST:
            raise SearchUnavailableError(
                f"all of the first {self._refused} queries were refused. The last one: {error}. Check the address of "
                "the search backend, and what it expects"
            ) from error

    def _check_rate(self, error: SearchError) -> None:
        searches, failures = len(self._failed), sum(self._failed)
        if searches >= FEWEST and failures > self._max_failure_rate * searches:
            raise SearchUnavailableError(
                f"{failures} of the last {searches} searches failed; max_search_failure_rate allows "
                f"{self._max_failure_rate:.0%}. The last one: {error}. Check that the search backend answers"
            ) from error


_services: dict[tuple[asyncio.AbstractEventLoop, Any], SearchService] = {}


def shared_service(key: Any, make: Callable[[], SearchService]) -> SearchService:
    """The service for these settings in the running event loop; made at the first call, then shared."""
    place = asyncio.get_running_loop(), key
    if place not in _services:
        for ended in [other for other in _services if other[0].is_closed()]:
            del _services[ended]
        _services[place] = make()
    return _services[place]


def guarded_backend(
    function: Callable[[str, int], Awaitable[Sequence[Any]]], name: str, *, topk: int, timeout: float, retries: int
) -> Backend:
    """Wrap a user's `async def search(query, topk)`: adds a timeout (seconds per attempt), retries and typed errors.

    Of a longer list the first `topk` passages are taken.
    """

    async def attempt(query: str) -> Sequence[Any]:
        try:
            async with asyncio.timeout(timeout):
                with waiting_for(f"search by {name}"):
                    found = await function(clean_query(query), topk)
            return found[:topk] if isinstance(found, list | tuple) else found  # what else it is, is told later
        except (SearchError, QueryError):
            raise
        except TimeoutError:
            raise SearchError(f"{name}: no answer within {timeout} s", "timeout", retryable=True) from None
        except Exception as error:
            if is_query_fault(error):
                raise QueryError(f"{name}: {type(error).__name__}: {error}", str(error)) from error
            raise SearchError(f"{name}: {type(error).__name__}: {error}", "backend", retryable=True) from error

    return lambda query: with_search_retries(lambda: attempt(query), retries)


TEST_QUESTION, TEST_SECONDS = "capital of France", 15.0


async def ask_test_question(backend: Backend, name: str, *, timeout: float, remedy: str = "") -> None:
    """Ask a backend one question; ValueError, with the remedy, if it does not answer within 15 s or `timeout`."""
    seconds = min(TEST_SECONDS, timeout)
    try:
        async with asyncio.timeout(seconds):
            _passages(await backend(TEST_QUESTION))
    except (SearchError, QueryError, TimeoutError) as error:
        found = str(error) or f"no answer within {seconds:g} s"
        remedies = "; ".join(filter(None, [remedy, "--no-search-check starts without asking"]))
        raise ValueError(
            f"expected the search backend {name} to answer a test question, found: {found}; {remedies}"
        ) from None


def _passages(items: Iterable[Any]) -> list[Passage]:
    try:
        if isinstance(items, str | bytes | Mapping):  # its letters or keys would look like passages
            raise TypeError(f"expected a list, found {str(items)[:200]!r}")
        return [to_passage(item) for item in items]
    except (ValueError, TypeError) as error:
        raise SearchError(f"the search backend's answer is not a list of passages: {error}", "response") from None


class _Statistics:
    """What this process counted since it was last taken."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.seconds: list[float] = []

    def count(self, name: str) -> None:
        self.outcomes[name] += 1

    def record(self, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] += 1
        self.seconds.append(seconds)


_statistics = _Statistics()

Searches = tuple[Counter[str], list[float]]
"""How searches ended, and the seconds that each request took."""


def take_searches() -> Searches:
    """What this process counted since the last call, for `add_searches` in another one."""
    taken = _statistics.outcomes.copy(), list(_statistics.seconds)
    _statistics.outcomes.clear()
    _statistics.seconds.clear()
    return taken


def add_searches(searches: Searches) -> None:
    """Count what another process has counted."""
    outcomes, seconds = searches
    _statistics.outcomes.update(outcomes)
    _statistics.seconds.extend(seconds)


_RATES = {
    "success": "success_rate",
    "timeout": "timeout_rate",
    "rate_limit": "rate_limit_rate",
    "connection": "connection_error_rate",
    "status": "status_error_rate",
    "response": "response_error_rate",
    "backend": "backend_error_rate",
    "query": "refused_query_rate",
}


@step_metrics
def drain_search_metrics() -> dict[str, float]:
    """`search/...` of this process since the last call: how searches ended (after retries), latency in seconds.

    Of all `search/calls`, `search/requests` reached the backend, `search/joined` shared the request of an equal query
    under way, and `search/cache_hits` came from the cache. A refused query is no error of the backend, and counts in
    `search/refused_query_rate` alone. Empty if nothing was searched.
    """
    outcomes, seconds = take_searches()
    if not outcomes:
        return {}
    shared = {f"search/{name}": float(outcomes[name]) for name in ("joined", "cache_hits")}
    calls = len(seconds) + sum(shared.values())
    counts = {"search/calls": calls, "search/requests": float(len(seconds)), **shared}
    if not seconds:
        return counts
    p50, p95 = np.percentile(seconds, [50, 95])
    return {
        **counts,
        "search/error_rate": 1.0 - (outcomes["success"] + outcomes["query"]) / len(seconds),
        **{f"search/{name}": outcomes[kind] / len(seconds) for kind, name in _RATES.items()},
        "search/latency_mean": float(np.mean(seconds)),
        "search/latency_p50": float(p50),
        "search/latency_p95": float(p95),
        "search/latency_max": max(seconds),
    }
