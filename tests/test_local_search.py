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

from generate_with_search import SEARCH_R1_CONFIGS
from local_search_server import local_search
from sleuth.search import SearchError, http, shared_session, to_passage
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
    if case["expect"] == "error":
        with pytest.raises(SearchError):
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
    ],
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

    retries = SEARCH_R1_CONFIGS["search_retries"]
    if down_seconds == 30.0:
        assert search(handler, retries=retries)
    else:
        with pytest.raises(SearchError, match="starting"):
            search(handler, retries=retries)
        assert len(attempts) == retries + 1
