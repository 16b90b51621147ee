"""Micro-batching, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_dense_retriever import batching
from local_dense_retriever.batching import Batcher, BatchingConfig, Hit, QueueFullError, SearchFailedError
from local_dense_retriever.metrics import Metrics
from local_dense_retriever.retrievers import Bm25Retriever, Retriever
from tests.retriever.scripted import ScriptedRetriever, fetch

Use = Callable[[Batcher], Awaitable[Any]]


def run(use: Use, retriever: Retriever, config: BatchingConfig | None = None, metrics: Metrics | None = None) -> Any:
    async def main() -> Any:
        batcher = Batcher(retriever, fetch, config or BatchingConfig(), metrics or Metrics())
        batcher.start()
        try:
            return await use(batcher)
        finally:
            await batcher.close()

    return asyncio.run(main())


async def started(retriever: ScriptedRetriever) -> None:
    """Wait until the retriever is in a search."""
    await asyncio.to_thread(retriever.entered.acquire)


async def queued(*searches: Awaitable[Any]) -> list[asyncio.Future[Any]]:
    """The searches as tasks that have begun."""
    tasks = [asyncio.ensure_future(search) for search in searches]
    await asyncio.sleep(0)
    return tasks


def found(query: str, topk: int) -> list[Hit]:
    return [Hit(fetch(rank), float(len(query) - rank)) for rank in range(topk)]


def value(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(name) or 0.0


@pytest.mark.parametrize("queries", [[], ["a"], ["a", "bb"], ["a", "nothing", "a", "ccc"]])
def test_one_list_a_query_in_their_order(queries: list[str]) -> None:
    answer = run(lambda batcher: batcher.search(queries, 2), ScriptedRetriever())
    assert answer == [[] if query == "nothing" else found(query, 2) for query in queries]


@pytest.mark.parametrize(("share", "batches"), [(1e6, [["a"], ["bb", "ccc"]]), (0.0, [["a"], ["bb"], ["ccc"]])])
def test_those_just_answered_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, share: float, batches: list[list[str]]
) -> None:
    monkeypatch.setattr(batching, "RETURN_SHARE", share)
    retriever = ScriptedRetriever()
    retriever.gate.clear()

    async def use(batcher: Batcher) -> None:
        first = await queued(batcher.search(["a"], 1))
        await started(retriever)
        other = await queued(batcher.search(["bb"], 1))
        retriever.gate.set()
        await asyncio.gather(*first)
        if not share:
            await asyncio.gather(*other)
        assert await batcher.search(["ccc"], 1) == [found("ccc", 1)]
        assert await asyncio.gather(*other) == [[found("bb", 1)]]

    run(use, retriever)
    assert retriever.batches == batches


def test_what_queues_up_while_a_search_runs_is_searched_together() -> None:
    retriever, metrics = ScriptedRetriever(), Metrics()
    retriever.gate.clear()

    async def use(batcher: Batcher) -> None:
        first = await queued(batcher.search(["first"], 1))
        await started(retriever)
        rest = await queued(
            batcher.search(["a", "bb"], 1), batcher.search(["ccc"], 5), batcher.search(["bb", "dddd"], 2)
        )
        retriever.gate.set()
        assert await asyncio.gather(*rest) == [
            [found("a", 1), found("bb", 1)],
            [found("ccc", 5)],
            [found("bb", 2), found("dddd", 2)],
        ]
        await asyncio.gather(*first)

    run(use, retriever, metrics=metrics)
    assert retriever.batches == [["first"], ["a", "bb", "ccc", "dddd"]]
    assert value(metrics, "retrieval_joined_total") == 1
    assert value(metrics, "retrieval_batch_size_sum") == 5


def test_a_query_under_way_is_joined_if_it_finds_enough() -> None:
    retriever = ScriptedRetriever()
    retriever.gate.clear()

    async def use(batcher: Batcher) -> None:
        first = await queued(batcher.search(["a"], 2))
        await started(retriever)
        rest = await queued(batcher.search(["a"], 1), batcher.search(["a"], 3))
        retriever.gate.set()
        assert await asyncio.gather(*first, *rest) == [[found("a", k)] for k in (2, 1, 3)]

    run(use, retriever)
    assert retriever.batches == [["a"], ["a"]]


def test_batches_have_a_limit() -> None:
    retriever = ScriptedRetriever()
    retriever.gate.clear()

    async def use(batcher: Batcher) -> None:
        search = await queued(batcher.search([str(number) for number in range(10)], 1))
        retriever.gate.set()
        await asyncio.gather(*search)

    run(use, retriever, BatchingConfig(max_batch_size=4))
    assert [len(batch) for batch in retriever.batches] == [4, 4, 2]


def test_an_idle_thread_waits_only_as_long_as_it_may() -> None:
    retriever = ScriptedRetriever()

    async def use(batcher: Batcher) -> None:
        await asyncio.gather(*(batcher.search([text], 1) for text in "ab"))

    run(use, retriever, BatchingConfig(max_wait_seconds=30, max_batch_size=2))  # full, so it does not wait
    run(use, retriever, BatchingConfig(max_wait_seconds=0.05))
    assert [sorted(batch) for batch in retriever.batches] == [["a", "b"], ["a", "b"]]


def test_a_full_queue_refuses_the_whole_request() -> None:
    retriever = ScriptedRetriever()
    retriever.gate.clear()

    async def use(batcher: Batcher) -> None:
        running = await queued(batcher.search(["running"], 1))
        await started(retriever)
        waiting = await queued(batcher.search(["a", "b"], 1))
        with pytest.raises(QueueFullError, match="2 queries wait already; at most 3"):
            await batcher.search(["c", "d"], 1)
        joining = await queued(batcher.search(["a", "b", "running"], 1))  # takes no room
        retriever.gate.set()
        await asyncio.gather(*running, *waiting, *joining)
        await batcher.search(["c", "d"], 1)

    run(use, retriever, BatchingConfig(max_queue=3))
    assert retriever.batches == [["running"], ["a", "b"], ["c", "d"]]


def test_a_cancelled_request_leaves_the_queue_but_not_what_others_wait_for() -> None:
    retriever, metrics = ScriptedRetriever(), Metrics()
    retriever.gate.clear()

    async def use(batcher: Batcher) -> None:
        running, gone = await queued(batcher.search(["running"], 1), batcher.search(["mine", "ours", "running"], 1))
        await started(retriever)
        (other,) = await queued(batcher.search(["ours"], 1))
        gone.cancel()
        await asyncio.wait([gone])
        retriever.gate.set()
        assert await asyncio.gather(running, other) == [[found("running", 1)], [found("ours", 1)]]

    # One at a time, or the first batch would hold all.
    run(use, retriever, BatchingConfig(max_batch_size=1), metrics)
    assert retriever.asked == ["running", "ours"]
    assert value(metrics, "retrieval_abandoned_total") == 1


def test_a_failed_search_fails_its_batch_only() -> None:
    retriever, metrics = ScriptedRetriever(), Metrics()
    retriever.gate.clear()

    async def use(batcher: Batcher) -> None:
        first = await queued(batcher.search(["first"], 1))
        await started(retriever)
        second = await queued(batcher.search(["boom"], 1), batcher.search(["with it"], 1))
        retriever.gate.set()
        assert await asyncio.gather(*first) == [[found("first", 1)]]
        for failed in await asyncio.gather(*second, return_exceptions=True):
            assert isinstance(failed, SearchFailedError)
            assert str(failed) == "RuntimeError: out of memory"
        assert await batcher.search(["with it"], 1) == [found("with it", 1)]

    run(use, retriever, metrics=metrics)
    assert value(metrics, "retrieval_batch_failures_total") == 1


def test_closing_finishes_what_was_accepted() -> None:
    retriever = ScriptedRetriever()
    retriever.gate.clear()

    async def use(batcher: Batcher) -> list[asyncio.Future[Any]]:
        searches = await queued(batcher.search(["a"], 1), batcher.search(["b"], 1))
        asyncio.get_running_loop().call_later(0.05, retriever.gate.set)
        await batcher.close()
        return await asyncio.gather(*searches)

    assert run(use, retriever, BatchingConfig(max_batch_size=1)) == [[found("a", 1)], [found("b", 1)]]


def test_the_cache_knows_a_query_with_as_many_results_or_more() -> None:
    retriever, metrics = ScriptedRetriever(), Metrics()

    async def use(batcher: Batcher) -> None:
        for topk in (3, 3, 2, 5, 4):
            assert await batcher.search(["a"], topk) == [found("a", topk)]
        assert await batcher.search(["nothing"], 1) == await batcher.search(["nothing"], 9) == [[]]

    run(use, retriever, metrics=metrics)
    assert retriever.asked == ["a", "a", "nothing"]
    assert value(metrics, "retrieval_cache_hits_total") == 4
    assert value(metrics, "retrieval_cache_misses_total") == 3


def test_the_cache_is_bounded_by_results_and_can_be_off() -> None:
    retriever = ScriptedRetriever()

    async def use(batcher: Batcher) -> None:
        for query, topk in (("a", 3), ("b", 3), ("a", 3), ("c", 3), ("b", 3), ("huge", 100), ("huge", 100)):
            assert await batcher.search([query], topk) == [found(query, topk)]

    run(use, retriever, BatchingConfig(cache_size=2, cached_topk=3))
    assert retriever.asked == ["a", "b", "c", "b", "huge", "huge"]
    run(use, retriever, BatchingConfig(cache_size=0))
    assert len(retriever.asked) == 6 + 7


WORDS = st.lists(
    st.sampled_from(["capital", "france", "spain", "hamlet", "tragedy", "bern", "city", "xyzzy", "the"]), min_size=1
)
REQUESTS = st.lists(st.tuples(st.lists(WORDS.map(" ".join), max_size=4), st.integers(1, 5)), max_size=12)
CORPUS = [
    {"contents": f'"{title}"\n{text}'}
    for title in ("France", "Spain", "Bern", "Hamlet")
    for text in ("The capital city.", "A tragedy of France and Spain.", "No city, no capital, no hamlet.")
]


@settings(max_examples=40, deadline=None)
@given(REQUESTS)
def test_batched_answers_are_those_of_one_search_each(requests: list[tuple[list[str], int]]) -> None:
    retriever = Bm25Retriever.build(CORPUS)

    async def use(batcher: Batcher) -> list[list[list[Hit]]]:
        return await asyncio.gather(*(batcher.search(queries, topk) for queries, topk in requests))

    alone = [
        [
            [Hit(fetch(i), score) for i, score in retriever.search(retriever.encode([query]), topk)[0]]
            for query in queries
        ]
        for queries, topk in requests
    ]
    assert run(use, retriever, BatchingConfig(max_batch_size=8)) == alone
