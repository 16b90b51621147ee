"""Requests to a search server that redirects, answers without end, or hides behind a proxy. The servers are real."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pydantic
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from sleuth.search import QueryError, SearchError, http, is_query_fault, request_text, with_search_retries
from sleuth.search.http import clean_query
from tests.scripted import serving

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GOOD = '{"result": [[]]}'
QUERY = {"queries": ["q"]}


def ask(handler: Handler, method: str = "POST", path: str = "/retrieve", **options: Any) -> tuple[str, int]:
    """What `request_text` gives with two retries, and how many requests the server saw."""
    seen = 0

    async def counting(request: web.Request) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        return await handler(request)

    async def run() -> str:
        async with serving(counting, path) as url:
            body = {"json": QUERY} if method == "POST" else {}
            return await with_search_retries(
                lambda: request_text(method, url, **{"timeout": 10.0, **body, **options}), retries=2
            )

    try:
        return asyncio.run(run()), seen
    except SearchError as error:
        error.requests = seen  # type: ignore[attr-defined]
        raise


def fails(handler: Handler, told: str, *, kind: str, requests: int, **options: Any) -> str:
    with pytest.raises(SearchError, match=told) as caught:
        ask(handler, **options)
    assert (caught.value.kind, caught.value.requests) == (kind, requests)  # type: ignore[attr-defined]
    return str(caught.value)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_exponential", lambda state: 0.01)


def redirecting(status: int, location: str, answer: str = GOOD, content_type: str = "application/json") -> Handler:
    async def handler(request: web.Request) -> web.Response:
        if request.path == "/retrieve":
            return web.Response(status=status, headers={"Location": location})
        if request.method == "POST":
            assert await request.json() == QUERY
        return web.Response(text=answer, content_type=content_type)

    return handler


# --- Redirects ---


@pytest.mark.parametrize(("method", "status"), [("POST", 307), ("POST", 308), ("GET", 301), ("GET", 302), ("GET", 303)])
def test_a_redirect_that_keeps_the_query_is_followed(method: str, status: int) -> None:
    assert ask(redirecting(status, "/v2/retrieve"), method) == (GOOD, 2)


@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirect_that_would_lose_the_query_is_an_error(status: int) -> None:
    told = f"status {status}, a redirect to '/v2', which would lose the query; .* set that address instead"
    fails(redirecting(status, "/v2"), told, kind="status", requests=1)


def test_redirects_in_a_circle_are_not_asked_again() -> None:
    told = r"/retrieve: more than 5 redirects, the last one to http://127\.0\.0\.1:\d+/retrieve"
    fails(redirecting(307, "/retrieve"), told, kind="status", requests=6)


def test_a_redirect_to_a_page_is_named() -> None:
    handler = redirecting(307, "/login", "<html>Who are you?</html>", "text/html")
    told = r"/retrieve \(redirected to http://127\.0\.0\.1:\d+/login\): found a page of HTML"
    fails(handler, told, kind="response", requests=2)


@pytest.mark.parametrize("location", ["ftp://127.0.0.1/x", "mailto:x@y.z", "http://:0/", "http://[", "file:///etc"])
def test_a_redirect_to_no_http_address(location: str) -> None:
    fails(redirecting(307, location), "which is no http address", kind="status", requests=1)


def test_a_redirect_does_not_lead_a_key_to_another_server() -> None:
    async def run() -> None:
        async with serving(redirecting(200, "/")) as other, serving(redirecting(307, other), "/retrieve") as url:
            with pytest.raises(SearchError, match="another server, which must not see the key"):
                await request_text("POST", url, timeout=5, json=QUERY, headers={"X-API-KEY": "k"})
            assert await request_text("POST", url, timeout=5, json=QUERY) == GOOD

    asyncio.run(run())


@pytest.mark.parametrize("status", [300, 304, 307])
def test_a_redirect_to_nowhere(status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status)

    fails(handler, f"status {status}", kind="status", requests=1)


def test_redirects_share_the_time() -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.15)
        return web.Response(status=307, headers={"Location": "/retrieve"})

    fails(slow, "no answer within 0.4 s", kind="timeout", requests=9, timeout=0.4)


# --- Long answers ---


@pytest.mark.parametrize("length_told", [False, True])
def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch, length_told: bool) -> None:
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1_000_000)
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Length": "500000000"} if length_told else {})
        await response.prepare(request)
        while sent < 500_000_000:
            await response.write(b" " * 100_000)
            sent += 100_000
        return response

    fails(endless, "the answer is longer than 1000000 bytes", kind="response", requests=1)
    assert sent < 100_000_000


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_an_answer_that_grows_as_it_is_unpacked(encoding: str) -> None:
    bomb = b" " * 500_000_000
    packed = gzip.compress(bomb, 9) if encoding == "gzip" else zlib.compress(bomb, 9)
    del bomb

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": encoding})

    tracemalloc.start()
    fails(handler, "the answer is longer than 33554432 bytes", kind="response", requests=1)
    assert tracemalloc.get_traced_memory()[1] < 120_000_000
    tracemalloc.stop()


def test_long_answers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"result": [["x" * 3_000_000]]})
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", len(text))

    async def handler(request: web.Request) -> web.Response:
        response = web.Response(text=text)
        response.enable_compression()
        return response

    assert ask(handler) == (text, 1)


# --- Proxies ---


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_the_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert ask(redirecting(307, "/x"), path="/retrieve") == (GOOD, 2)


def test_a_proxy_that_is_named_is_used_for_this_machine_too() -> None:
    fails(redirecting(200, "/"), "9", kind="connection", requests=0, proxy="http://127.0.0.1:9")


def test_the_password_of_a_proxy_is_never_told() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=407)  # a tunnel (CONNECT) gets a 404

    async def run() -> None:
        async with serving(refuse) as url:
            proxy = url.replace("http://", "http://user:secret@")
            for target in ("https://search.invalid/x", "http://search.invalid/x"):
                with pytest.raises(SearchError, match=r"40[47]") as caught:
                    await request_text("POST", target, timeout=5, json=QUERY, proxy=proxy)
                assert "secret" not in str(caught.value)
                assert not caught.value.retryable

    asyncio.run(run())


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "http://" + "a" * 70 + "/x", "http://user:secret@127.0.0.1:9/x"])
def test_an_address_that_cannot_be_asked(url: str) -> None:
    with pytest.raises(SearchError) as caught:
        asyncio.run(request_text("POST", url, timeout=5))
    assert caught.value.kind == "connection"
    assert caught.value.retryable is ("127.0.0.1:9" in url)  # a server may come back, the rest stays wrong
    assert "secret" not in str(caught.value)


def test_a_key_that_cannot_be_sent_is_not_told() -> None:
    options = {"headers": {"X-API-KEY": "secret\nsecret"}, "hidden": "secret\nsecret"}
    assert "secret" not in fails(redirecting(200, "/"), "cannot be asked", kind="connection", requests=0, **options)


# --- Queries ---


@given(st.text(st.characters(exclude_categories=[])))
def test_a_query_that_was_cleaned_can_be_sent(query: str) -> None:
    try:
        cleaned = clean_query(query)
    except QueryError:
        return
    assert json.loads(json.dumps(cleaned).encode()) == cleaned.encode().decode() == cleaned == clean_query(cleaned)
    assert "\0" not in cleaned
    assert cleaned.strip() == cleaned != ""


def client_error(status: int) -> aiohttp.ClientResponseError:
    return aiohttp.ClientResponseError(None, (), status=status)  # type: ignore[arg-type]


def raised(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    return caught.value


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (QueryError("no"), True),
        (ValueError("too long"), True),
        (raised(lambda: "\ud800".encode()), True),
        (client_error(400), True),
        (client_error(422), True),
        (client_error(404), False),
        (client_error(429), False),
        (client_error(500), False),
        (raised(lambda: json.loads("<html>")), False),
        (raised(lambda: b"\xff".decode()), False),
        (raised(lambda: pydantic.TypeAdapter(int).validate_python("x")), False),
        (aiohttp.InvalidURL("http://["), False),
        (ConnectionError("refused"), False),
        (KeyError("result"), False),
        (SearchError("down", "backend"), False),
    ],
    ids=repr,
)
def test_whose_fault_an_error_is(error: Exception, fault: bool) -> None:
    assert is_query_fault(error) is fault


@pytest.mark.parametrize("status", [400, 404])
@pytest.mark.parametrize("client", ["requests", "httpx"])
def test_whose_fault_a_status_is_for_other_clients(client: str, status: int) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status)

    async def run() -> Exception:
        library = pytest.importorskip(client)
        async with serving(refuse) as url:
            answer = await asyncio.to_thread(library.get, url)
            return raised(answer.raise_for_status)

    assert is_query_fault(asyncio.run(run())) is (status == 400)


@given(st.one_of(st.text(), st.sampled_from(["nan", "-inf", "1e400", "Mon, 01 Jan 0001 00:00:00 -0000", "-5"])))
def test_any_retry_after_is_a_time_or_nothing(value: str) -> None:
    seconds = http._seconds(value)
    assert seconds is None or seconds >= 0
