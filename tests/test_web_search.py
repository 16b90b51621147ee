"""The clients of search APIs, each against a local server that answers as the real one is documented to."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from aiohttp import web

from sleuth.search import QueryError, SearchError, http
from tests.scripted import serving
from tests.web_backends import BACKENDS, DEEPSEEK, KEY, NOTHING, SEARXNG, WIKIPEDIA, ZHIHU, Handler
from zhihu_search import Keys, zhihu_search

every_backend = pytest.mark.parametrize("name", BACKENDS)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_exponential", lambda state: 0.01)


def ask(name: str, *answers: Any, **options: Any) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """The passages where a server answers so, one after the other and the last for ever, and what it was asked."""
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        form = dict(await request.post()) if "form" in request.content_type else {}
        body = await request.json() if request.content_type == "application/json" and request.can_read_body else {}
        seen.append({**request.query, **form, **body, "path": request.path, "headers": request.headers})
        answer = answers[min(len(seen), len(answers)) - 1]
        return await answer(request) if callable(answer) else web.json_response(answer)

    async def run() -> list[dict[str, str]]:
        async with serving(handler) as url:
            return await BACKENDS[name][0](url, **{"retries": 1, "timeout": 5.0, **options})

    return asyncio.run(run()), seen


def status(code: int, text: str = "no", **headers: str) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(
            status=code, text=text, headers={key.replace("_", "-"): value for key, value in headers.items()}
        )

    return answer


# --- What every backend does ---


@every_backend
def test_passages(name: str) -> None:
    passages, _ = ask(name, BACKENDS[name][1])
    assert [(passage["title"], passage["text"]) for passage in passages] == BACKENDS[name][2]


@every_backend
def test_no_more_than_asked_for(name: str) -> None:
    assert len(ask(name, BACKENDS[name][1], top_k=1)[0]) == 1


@every_backend
def test_no_results_is_no_failure(name: str) -> None:
    assert ask(name, NOTHING[name])[0] == []


@every_backend
@pytest.mark.parametrize("code", [429, 500, 503])
def test_what_passes_is_tried_again(name: str, code: int) -> None:
    passages, seen = ask(name, status(code, Retry_After="0"), BACKENDS[name][1])
    assert len(passages) == len(BACKENDS[name][2])
    assert len(seen) == 2


@every_backend
@pytest.mark.parametrize(
    ("code", "kind", "asked"), [(429, "rate_limit", 2), (502, "status", 2), (401, "status", 1), (403, "status", 1)]
)
def test_what_stays_is_a_failure(name: str, code: int, kind: str, asked: int) -> None:
    count = 0

    async def refuse(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.Response(status=code, headers={"Retry-After": "0"})

    with pytest.raises(SearchError, match=f"status {code}") as caught:
        ask(name, refuse)
    assert (caught.value.kind, count) == (kind, asked)


@every_backend
@pytest.mark.parametrize("code", [400, 414])
def test_a_query_that_is_refused_is_no_failure(name: str, code: int) -> None:
    with pytest.raises(QueryError):
        ask(name, status(code))


@every_backend
@pytest.mark.parametrize("text", ["<html>Sign in</html>", "", "[]", "null", "7", '{"a": 1}', "[" * 100_000, "\ud7ff\0"])
def test_other_answers_are_failures(name: str, text: str) -> None:
    with pytest.raises(SearchError) as caught:
        ask(name, status(200, text))
    assert caught.value.kind == "response"


@every_backend
def test_half_an_answer_is_a_failure(name: str) -> None:
    text = json.dumps(BACKENDS[name][1])
    with pytest.raises(SearchError) as caught:
        ask(name, status(200, text[: len(text) // 2]))
    assert caught.value.kind == "response"


@every_backend
def test_a_connection_that_breaks_is_tried_again(name: str) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"results": [')
        request.transport.close()
        return response

    assert len(ask(name, breaks, BACKENDS[name][1])[0]) == len(BACKENDS[name][2])


@every_backend
def test_a_long_answer_is_read_and_an_endless_one_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = json.dumps({**BACKENDS[name][1], "more": "x" * 10_000_000})
    assert len(ask(name, status(200, long), timeout=30.0)[0]) == len(BACKENDS[name][2])
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1_000_000)
    with pytest.raises(SearchError, match="longer than 1000000 bytes"):
        ask(name, status(200, long))


@every_backend
def test_a_hang_is_a_timeout(name: str) -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        raise AssertionError("the client had given up")

    with pytest.raises(SearchError) as caught:
        ask(name, hang, timeout=0.2)
    assert (caught.value.kind, caught.value.retryable) == ("timeout", True)


@every_backend
@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:9/private", "http://169.254.169.254/latest", "file:///etc/passwd"]
)
def test_a_redirect_elsewhere_is_not_followed(name: str, target: str) -> None:
    with pytest.raises(SearchError):
        ask(name, status(302, Location=target), timeout=1.0)


@every_backend
@pytest.mark.parametrize("query", ["", " \n", "\ud800", "\0"])
def test_a_blank_query_is_not_sent(name: str, query: str) -> None:
    with pytest.raises(QueryError, match="blank"):
        asyncio.run(BACKENDS[name][0]("http://127.0.0.1:9/", query))


@every_backend
@pytest.mark.parametrize("query", ["北京 & x=1?#%", "what " * 300, 'say "hi"\n<b>'])
def test_queries_arrive_as_they_are(name: str, query: str) -> None:
    _, seen = ask(name, BACKENDS[name][1], query=query)
    found = seen[0].get("gsrsearch") or seen[0].get("query") or seen[0].get("Query") or seen[0].get("q")
    assert found.replace("\r\n", "\n") == query.strip()


@pytest.mark.parametrize("name", ["deepseek", "zhihu"])
@pytest.mark.parametrize(("code", "text"), [(401, f"bad key {KEY}"), (200, KEY), (500, "." * 190 + KEY), (400, KEY)])
def test_the_key_is_never_told(name: str, code: int, text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises((SearchError, QueryError)) as caught:
        ask(name, status(code, text))
    error: BaseException | None = caught.value
    while error is not None:
        assert KEY[:10] not in f"{error!s} {error!r}"
        error = error.__cause__ or error.__context__
    assert KEY not in caplog.text


# --- What each does ---


def test_wikipedia_is_asked_as_its_rules_say() -> None:
    _, seen = ask("wikipedia", WIKIPEDIA, top_k=50)
    expected = {"action": "query", "format": "json", "generator": "search", "gsrlimit": "20", "prop": "extracts"}
    assert expected.items() <= seen[0].items()
    assert {"exintro": "1", "explaintext": "1", "maxlag": "5"}.items() <= seen[0].items()
    agent = seen[0]["headers"]["User-Agent"]
    assert agent.startswith("sleuth-search/1.0 (me@a.test) aiohttp/")


@pytest.mark.parametrize(
    ("code", "error", "asked"),
    [
        ("cirrussearch-query-too-long", QueryError, 1),
        ("maxlag", SearchError, 2),
        ("internal_api_error_DBQueryError", SearchError, 2),
        ("badvalue", SearchError, 1),
    ],
)
def test_wikipedias_errors_come_with_status_200(code: str, error: type[Exception], asked: int) -> None:
    count = 0

    async def refuse(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.json_response({"error": {"code": code, "info": "Said so."}, "servedby": "mw1"})

    with pytest.raises(error, match=r"Said so\."):
        ask("wikipedia", refuse)
    assert count == asked


def test_deepseek_and_zhihu_send_the_key_in_a_header() -> None:
    _, seen = ask("deepseek", DEEPSEEK)
    assert (seen[0]["path"], seen[0]["query"]) == ("/v1/tools/search", "big cities")
    _, asked = ask("zhihu", ZHIHU, top_k=50)
    assert (asked[0]["Count"], asked[0]["SearchDB"]) == ("20", "all")
    assert asked[0]["headers"]["X-Request-Timestamp"].isdigit()
    for one in (seen[0], asked[0]):
        assert one["headers"]["Authorization"] == f"Bearer {KEY}"


def search_zhihu(keys: Keys, searches: int, refused: dict[str, web.Response], **options: Any) -> list[str]:
    """The keys of the requests that so many searches made, where those of `refused` are answered so."""
    used: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        used.append(request.headers["Authorization"].removeprefix("Bearer "))
        return refused.get(used[-1]) or web.json_response(ZHIHU)

    async def run() -> None:
        async with serving(handler) as url:
            for _ in range(searches):
                assert await zhihu_search(keys, "q", url=url, **{"retries": 3, **options})

    asyncio.run(run())
    return used


def test_zhihus_keys_take_turns() -> None:
    assert search_zhihu(Keys(["key-a", "key-b", "key-c"]), 4, {}) == ["key-a", "key-b", "key-c", "key-a"]


def test_a_key_that_is_limited_rests_while_others_go_on() -> None:
    refused = {"key-a": web.Response(status=429, headers={"Retry-After": "100"})}
    assert search_zhihu(Keys(["key-a", "key-b", "key-c"]), 4, refused) == ["key-a", "key-b", "key-c", "key-b", "key-c"]


def test_a_key_comes_back_after_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, now = Keys(["key-a", "key-b"]), 1000.0
    monkeypatch.setattr("zhihu_search.time.monotonic", lambda: now)
    assert keys.take() == "key-a"
    keys.rest("key-a", 30.0)
    assert [keys.take(), keys.take()] == ["key-b", "key-b"]
    assert keys.limited("x").retry_after == 0.0
    keys.rest("key-b", 60.0)
    with pytest.raises(SearchError, match="all 2 keys") as caught:
        keys.take()
    assert caught.value.retry_after == 30.0
    now += 31.0
    assert keys.take() == "key-a"


@pytest.mark.parametrize("code", [30001, 30002])
def test_zhihus_own_codes_of_limits_rest_a_key(code: int) -> None:
    used: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        used.append(request.headers["Authorization"].removeprefix("Bearer "))
        return web.json_response({"Code": code, "Message": "slow down"} if used[-1] == "key-a" else ZHIHU)

    async def run() -> None:
        async with serving(handler) as url:
            keys = Keys(["key-a", "key-b"])
            for _ in range(2):
                await zhihu_search(keys, "q", url=url)

    asyncio.run(run())
    assert used == ["key-a", "key-b", "key-b"]


def test_an_unknown_code_of_zhihus_is_a_failure() -> None:
    with pytest.raises(SearchError, match="code 20001: wrong secret") as caught:
        ask("zhihu", {"Code": 20001, "Message": "wrong secret"})
    assert caught.value.kind == "response"


def test_searxng_without_engines_is_no_empty_result() -> None:
    with pytest.raises(SearchError, match="engines gave no answer") as caught:
        ask("searxng", {"query": "x", "results": [], "unresponsive_engines": [["brave", "timeout"]]})
    assert caught.value.retryable


def test_searxng_without_json_says_what_to_allow() -> None:
    with pytest.raises(SearchError, match=r"search\.formats"):
        ask("searxng", status(403))
    _, seen = ask("searxng", SEARXNG, params={"engines": "brave"})
    assert (seen[0]["path"], seen[0]["format"], seen[0]["engines"]) == ("/search", "json", "brave")
