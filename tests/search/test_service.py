"""The search service under load, and what it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sleuth.search import (
    QueryError,
    SearchError,
    SearchService,
    SearchUnavailableError,
    drain_search_metrics,
    guarded_backend,
)


class Backend:
    """Answers after a moment with the query itself; remembers how it was asked."""

    def __init__(self, error: SearchError | None = None) -> None:
        self.queries: list[str] = []
        self.under_way = self.most = 0
        self.error = error

    async def __call__(self, query: str) -> list[str]:
        self.queries.append(query)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.01)
        self.under_way -= 1
        if self.error:
            raise self.error
        return [f'"T"\n{query}']


@pytest.fixture(autouse=True)
def _no_counts() -> None:
    drain_search_metrics()


def run(service: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(service())  # type: ignore[arg-type]


def test_no_more_at_once_than_allowed() -> None:
    backend = Backend()

    async def many() -> list[Any]:
        service = SearchService(backend, concurrency=3)
        return await asyncio.gather(*(service.search(str(number)) for number in range(20)))

    assert [passages[0].text for passages in run(many)] == [str(number) for number in range(20)]
    assert backend.most == 3


def test_the_same_query_under_way_is_asked_once() -> None:
    backend = Backend()

    async def same() -> None:
        service = SearchService(backend, concurrency=8)
        first = await asyncio.gather(*(service.search("q") for _ in range(5)))
        assert all(passages == first[0] for passages in first)
        await service.search("q")  # over, so asked again

    run(same)
    assert backend.queries == ["q", "q"]
    metrics = drain_search_metrics()
    assert (metrics["search/requests"], metrics["search/joined"]) == (2, 4)


def test_a_caller_that_is_cancelled_leaves_the_others_their_search() -> None:
    backend = Backend()

    async def cancelled() -> Any:
        service = SearchService(backend, concurrency=8)
        first = asyncio.create_task(service.search("q"))
        second = asyncio.create_task(service.search("q"))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert run(cancelled)[0].text == "q"


def test_a_failure_is_shared_and_not_kept() -> None:
    backend = Backend(SearchError("down", "timeout"))

    async def failing() -> list[Any]:
        service = SearchService(backend, concurrency=8, cache_size=8)
        results = await asyncio.gather(*(service.search("q") for _ in range(3)), return_exceptions=True)
        backend.error = None
        return [*results, await service.search("q")]

    *errors, passages = run(failing)
    assert all(isinstance(error, SearchError) for error in errors)
    assert passages[0].text == "q"
    metrics = drain_search_metrics()
    assert (metrics["search/timeout_rate"], metrics["search/success_rate"]) == (0.5, 0.5)
    assert (metrics["search/calls"], metrics["search/requests"], metrics["search/error_rate"]) == (4, 2, 0.5)
    assert metrics["search/latency_max"] >= metrics["search/latency_p95"] >= metrics["search/latency_p50"] >= 0.01
    assert metrics["search/latency_mean"] >= 0.01


def test_the_last_results_are_kept() -> None:
    backend = Backend()

    async def cached() -> None:
        service = SearchService(backend, concurrency=8, cache_size=2)
        for query in ("a", "b", "a", "c", "a", "b"):
            await service.search(query)

    run(cached)
    assert backend.queries == ["a", "b", "c", "b"]
    assert drain_search_metrics()["search/cache_hits"] == 2


@pytest.mark.parametrize("allowed", [0.5, 1.0])
def test_too_many_failures_stop_it(allowed: float) -> None:
    async def failing() -> list[BaseException]:
        service = SearchService(Backend(SearchError("down", "status")), concurrency=1, max_failure_rate=allowed)
        queries = (service.search(str(number)) for number in range(25))
        return await asyncio.gather(*queries, return_exceptions=True)  # type: ignore[return-value]

    stopped = [isinstance(error, SearchUnavailableError) for error in run(failing)]
    assert stopped == ([False] * 19 + [True] * 6 if allowed < 1 else [False] * 25)


def test_few_failures_among_many_do_not() -> None:
    backend = Backend()

    async def mixed() -> list[Any]:
        service = SearchService(backend, concurrency=1, max_failure_rate=0.2)
        results = []
        for number in range(60):
            backend.error = SearchError("down", "status") if number % 6 == 0 else None
            results += await asyncio.gather(service.search(str(number)), return_exceptions=True)
        return results

    assert not any(isinstance(result, SearchUnavailableError) for result in run(mixed))


def test_nothing_searched_is_no_metric() -> None:
    assert drain_search_metrics() == {}


@pytest.mark.parametrize("answer", ["one text", {"result": ["a passage"]}, None, 3, [{"score": 1}]])
def test_an_answer_that_is_no_list_of_passages_is_a_failure(answer: Any) -> None:
    async def search(query: str) -> Any:
        return answer

    with pytest.raises(SearchError, match="not a list of passages"):
        run(lambda: SearchService(search, concurrency=1).search("q"))


def test_a_refused_query_is_no_failure_of_the_backend():
    async def refuse_long(query):
        if len(query) > 5:
            raise QueryError("too long")
        return ["Paris"]

    async def ask():
        service = SearchService(refuse_long, concurrency=2, max_failure_rate=0.0)
        await service.search("short")
        for number in range(30):
            with pytest.raises(QueryError):
                await service.search(f"a long one {number}")

    drain_search_metrics()
    asyncio.run(ask())
    metrics = drain_search_metrics()
    assert metrics["search/refused_query_rate"] == pytest.approx(30 / 31)
    assert metrics["search/error_rate"] == 0.0


def test_a_backend_that_refuses_everything_stops_the_run():
    async def refuse(query):
        raise QueryError("http://here: status 422: unknown field queries")

    async def ask():
        service = SearchService(refuse, concurrency=2)
        for number in range(19):
            with pytest.raises(QueryError):
                await service.search(str(number))
        with pytest.raises(SearchUnavailableError, match=r"all of the first 20 queries were refused.*unknown field"):
            await service.search("last")

    asyncio.run(ask())


def test_a_backend_of_the_users_own_may_refuse_a_query():
    async def picky(query, topk):
        raise ValueError("no more than three words")

    with pytest.raises(QueryError, match="no more than three words"):
        asyncio.run(guarded_backend(picky, "mine", topk=1, timeout=1.0, retries=3)("a"))


def test_no_more_than_topk_passages_are_taken() -> None:
    async def generous(query: str, topk: int) -> list[str]:
        return [f"title {i}\ntext" for i in range(50)]

    found = asyncio.run(guarded_backend(generous, "mine", topk=3, timeout=1.0, retries=0)("a"))
    assert found == ["title 0\ntext", "title 1\ntext", "title 2\ntext"]
