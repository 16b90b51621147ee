"""The retrieval client against real HTTP servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from generate_with_search import SearchSettings
from local_search_server import local_search
from sleuth.search import QueryError, SearchError, http, shared_session, to_passage
from tests.retriever.scripted import ScriptedRetriever
from tests.retriever.scripted import serving as retrieval_server
from tests.scripted import serving

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases/retrieve_responses.jsonl").open()]
GOOD = {"result": [[{"document": {"contents": '"France"\nParis.'}, "score": 0.9}]]}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
EXPONENTIAL = http._exponential


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_exponential", lambda state: 0.01)


def answering(*answers: tuple[int, Any], headers: dict[str, str] | None = None) -> tuple[Handler, list[dict[str, Any]]]:
    """A handler that gives the answers in order, the last one for ever, and the requests it saw."""
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        status, body = answers[min(len(seen), len(answers) - 1)]
        seen.append(await request.json())
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers if status != 200 else None)

    return handler, seen


def search(handler: Handler, **options: Any) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        async with serving(handler, "/retrieve") as url:
            return await local_search(url, "capital of France", **{"top_k": 3, "timeout": 5.0, **options})

    return asyncio.run(run())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_cases(case: dict[str, Any]) -> None:
    handler, seen = answering((case["status"], case["body"]))
    if isinstance(case["expect"], str):
        with pytest.raises(QueryError if case["expect"] == "query error" else SearchError):
            search(handler, retries=2)
        assert len(seen) == (3 if case["status"] == 500 else 1)
    else:
        passages = search(handler)
        assert [list(to_passage(passage)) for passage in passages] == case["expect"]
        assert all(set(passage) == {"document"} and set(passage["document"]) == {"contents"} for passage in passages)


def test_what_is_asked() -> None:
    handler, seen = answering((200, GOOD))
    search(handler, top_k=4)
    assert seen == [{"queries": ["capital of France"], "topk": 4, "return_scores": True}]


def test_more_than_asked_is_cut() -> None:
    handler, _ = answering((200, {"result": [GOOD["result"][0] * 5]}))
    assert len(search(handler, top_k=2)) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"result": [[], []]},
        {"result": {}},
        {"result": [None]},
        {"result": ["x"]},
        {"result": [[None]]},
        {"result": [[{"contents": None}]]},
        {"result": [[{"contents": 7}]]},
        {"result": [[{"document": None}]]},
        [],
        None,
        7,
        "",
        "[" * 100_000,
        *('{"result": [[' + '{"document":' * depth + "1" + "}" * depth + "]]}" for depth in range(900, 1000, 7)),
        '{"result": [[{"contents": NaN}]]}',
        '{"result": [[{"contents": ' + "1" * 5000 + "}]]}",
    ],
    ids=lambda body: str(body)[:30],
)
def test_other_shapes_are_errors(body: Any) -> None:
    handler, seen = answering((200, body))
    with pytest.raises(SearchError) as caught:
        search(handler)
    assert caught.value.kind == "response"
    assert len(seen) == 1


def test_a_failure_that_passes_is_retried() -> None:
    handler, seen = answering((503, "busy"), (429, "slow down"), (200, GOOD))
    assert len(search(handler)) == 1
    assert len(seen) == 3


# --- Queries that the server refuses ---


@pytest.mark.parametrize("status", [400, 413, 414, 422, 431, 451])
def test_a_query_that_is_refused_is_no_failure_of_the_server(status: int) -> None:
    handler, seen = answering((status, {"detail": "too long"}))
    with pytest.raises(QueryError, match=f"status {status}") as caught:
        search(handler, retries=3)
    assert caught.value.reason == "too long"
    assert not isinstance(caught.value, SearchError)
    assert len(seen) == 1


def ask_our_server(*queries: str) -> tuple[list[Any], list[str]]:
    """What the client gets from the project's own server for each query, errors included, and what it was asked."""
    retriever = ScriptedRetriever()

    async def run(url: str) -> list[Any]:
        asking = [local_search(f"{url}/retrieve", query, retries=2) for query in queries]
        return await asyncio.gather(*asking, return_exceptions=True)

    with retrieval_server(retriever) as url:
        return asyncio.run(run(url)), sorted(retriever.asked)


def test_a_query_too_long_for_our_server() -> None:
    (too_long, just_so), asked = ask_our_server("x" * 8193, "x" * 8192)
    assert isinstance(too_long, QueryError)
    assert too_long.reason == "queries[0]: String should have at most 8192 characters, found 8193"
    assert len(just_so) == 5
    assert asked == ["x" * 8192]


def test_what_no_server_can_read_of_a_query_is_taken_out() -> None:
    queries = ["capital\ud835 of\0France", "\ud83d\ude00 pair", " a\n\tb\x1b", "北京\udcff"]
    found, asked = ask_our_server(*queries)
    assert all(isinstance(passages, list) for passages in found), found
    assert asked == sorted(["capital  of France", "😀 pair", "a\n\tb", "北京"])


@pytest.mark.parametrize("query", ["", " \n", "\0", "\ud800", "\ufffd\u3000"])
def test_a_blank_query_is_not_sent(query: str) -> None:
    with pytest.raises(QueryError, match="blank"):
        asyncio.run(local_search("http://127.0.0.1:9/retrieve", query))


# --- Failures ---


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limit"), (500, "status"), (404, "status"), (401, "status")])
def test_kinds(status: int, kind: str) -> None:
    handler, seen = answering((status, "no"))
    with pytest.raises(SearchError, match=f"status {status}") as caught:
        search(handler, retries=1)
    assert caught.value.kind == kind
    assert len(seen) == (2 if status in (429, 500) else 1)


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_is_kept(date: bool) -> None:
    value = formatdate(time.time() + 2, usegmt=True) if date else "0.3"
    handler, _ = answering((503, "busy"), (200, GOOD), headers={"Retry-After": value})
    start = time.monotonic()
    search(handler)
    assert time.monotonic() - start > 0.25


def test_timeout() -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(2)
        return web.json_response(GOOD)

    with pytest.raises(SearchError, match="no answer within") as caught:
        search(slow, timeout=0.1, retries=0)
    assert caught.value.kind == "timeout"
    assert caught.value.retryable


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/retrieve", "nowhere", "http://[", ""])
def test_nobody_there(url: str) -> None:
    with pytest.raises(SearchError) as caught:
        asyncio.run(local_search(url, "q", retries=1))
    assert caught.value.kind == "connection"


def test_proxy_is_used() -> None:
    handler, seen = answering((200, GOOD))

    async def run() -> list[dict[str, Any]]:
        async with serving(handler) as proxy:
            return await local_search("http://retrieval.invalid/retrieve", "q", proxy=proxy)

    assert len(asyncio.run(run())) == 1
    assert len(seen) == 1


def test_one_session_a_loop_closed_with_it() -> None:
    async def run() -> Any:
        first, second = await asyncio.gather(shared_session(), shared_session())
        assert first is second
        return first

    session = asyncio.run(run())
    assert session.closed
    assert asyncio.run(run()) is not session


@pytest.mark.parametrize("down_seconds", [30.0, 1000.0])
def test_the_default_retries_outlast_a_restart_and_then_fail(
    monkeypatch: pytest.MonkeyPatch, down_seconds: float
) -> None:
    """The time is what the client means to wait; it does not pass."""
    waited: list[float] = []
    attempts: list[float] = []
    monkeypatch.setattr(http, "_exponential", EXPONENTIAL)
    monkeypatch.setattr(http.random, "uniform", lambda low, high: low)  # the shortest waits
    meant = http._wait_seconds
    monkeypatch.setattr(http, "_wait_seconds", lambda state: waited.append(meant(state)) or 0.0)

    async def handler(_: web.Request) -> web.Response:
        attempts.append(sum(waited))
        if attempts[-1] < down_seconds:
            return web.Response(status=502, text="starting")
        return web.json_response(GOOD)

    retries = SearchSettings.model_fields["search_retries"].default
    if down_seconds == 30.0:
        assert search(handler, retries=retries)
    else:
        with pytest.raises(SearchError, match="starting"):
            search(handler, retries=retries)
        assert len(attempts) == retries + 1
