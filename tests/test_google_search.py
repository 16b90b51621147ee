"""The Google client against a local server that speaks serper's JSON and serves pages in several charsets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from google_search_server import google_search
from sleuth.pages.text import CONTEXT_CHARS, decode_page, snippet_context
from sleuth.search import QueryError, SearchError, http, pages, to_passage
from sleuth.search.pages import check_public, is_public
from tests.scripted import serving

KEY = "s3cret-key-0123456789"
TEXTS = {
    "utf-8": "Zürich is the largest city of Switzerland, and the capital of its canton.",
    "gb18030": "北京是中华人民共和国的首都，也是全国的政治中心和文化中心，历史悠久。",
    "shift_jis": "東京は日本の首都であり、世界最大級の都市圏を形成している大都市です。",
    "windows-1251": "Москва является столицей России и крупнейшим городом страны по населению.",
    "iso-8859-1": "São Paulo é a maior cidade do Brasil e o principal centro econômico do país.",
    "euc-kr": "서울은 대한민국의 수도이자 최대의 도시이며 정치와 경제의 중심지이다.",
}
FILLER = "<p>Another paragraph, which has nothing to do with the question that was asked here at all.</p>" * 8


def html(text: str, charset: str | None = None) -> bytes:
    meta = f'<meta charset="{charset}">' if charset else ""
    page = f"<html><head>{meta}<title>T</title></head><body><nav>Home | Login</nav><article><h1>City</h1>{FILLER}"
    return f"{page}<p>{text}</p>{FILLER}</article></body></html>".encode(charset or "utf-8")


def search(answer: Any, *, status: int = 200, **options: Any) -> tuple[list[dict[str, Any]], list[web.Request]]:
    """The passages for serper's answer, and the requests it got."""
    seen: list[web.Request] = []

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        seen.append(request)
        return web.Response(status=status, text=answer if isinstance(answer, str) else json.dumps(answer))

    async def run() -> list[dict[str, Any]]:
        async with serving(handler, "/search") as url:
            return await google_search(KEY, "big cities", **{"top_k": 3, "retries": 1, "serper_url": url, **options})

    return asyncio.run(run()), seen


def organic(*snippets: str | None, **more: Any) -> dict[str, Any]:
    results = [{"title": f"T{i}", "link": f"http://x{i}.invalid/", "snippet": s} for i, s in enumerate(snippets)]
    return {"searchParameters": {"q": "big cities"}, "organic": results, **more}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_exponential", lambda state: 0.01)


# --- serper's JSON ---


def test_snippets() -> None:
    passages, seen = search(organic("one", "two", "three", "four"))
    assert [list(to_passage(passage)) for passage in passages] == [["T0", "one"], ["T1", "two"], ["T2", "three"]]
    assert seen[0].headers["X-API-KEY"] == KEY


@pytest.mark.parametrize(("top_k", "asked"), [(3, 10), (20, 20)])
def test_asks_for_ten_at_least(top_k: int, asked: int) -> None:
    bodies = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response(organic("one"))

    async def run() -> None:
        async with serving(handler) as url:
            await google_search(KEY, "big cities", top_k, serper_url=url)

    asyncio.run(run())
    assert bodies == [{"q": "big cities", "num": asked}]


def test_results_without_a_snippet_make_room_for_others() -> None:
    answer = organic(None, "", "two", " \n", "four")
    answer["organic"] += [
        None,
        "x",
        {"title": 7, "snippet": "no title"},
        {"snippet": "a\n b", "title": 'say "hi"\nyou'},
    ]
    passages, _ = search(answer, top_k=5)
    found = [list(to_passage(passage)) for passage in passages]
    assert found == [["T2", "two"], ["T4", "four"], ["", "no title"], ['say "hi" you', "a b"]]


@pytest.mark.parametrize("snippet", ["x", "é" * 20_000, "北京是首都", "مرحبا", "😀"])
def test_snippets_of_any_length_and_script(snippet: str) -> None:
    passages, _ = search(organic(snippet))
    assert to_passage(passages[0]).text == snippet


BOX = {"title": "Tower", "link": "http://x9.invalid/", "snippet": "Built in 1889."}
GRAPH = {
    "title": "Paris",
    "type": "Capital of France",
    "imageUrl": "http://x9.invalid/p.png",
    "description": "Paris is  a city.",
    "attributes": {"Population": "2.1 million", "Elevation (m)": 78, "Mayor": None, "Rivers": ["Seine", "Marne"]},
}
GRAPH_TEXT = "Capital of France\nParis is a city.\nPopulation: 2.1 million\nElevation (m): 78\nRivers: Seine; Marne"
ASKED = [{"question": "Who?", "title": "Builder", "snippet": "Eiffel.", "link": "http://x9.invalid/"}]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"answerBox": {"answer": "7"}}, [("", "7")]),
        ({"answerBox": {"title": "2 + 2 =", "answer": 4}}, [("2 + 2 =", "4")]),
        ({"answerBox": BOX}, [("Tower", "Built in 1889.")]),
        ({"answerBox": BOX | {"answer": "1889"}}, [("Tower", "1889 Built in 1889.")]),
        ({"answerBox": {"title": "T", "snippetHighlighted": ["1889", None, "Eiffel"]}}, [("T", "1889; Eiffel")]),
        ({"answerBox": {"title": "T", "snippetHighlighted": "1889"}}, [("T", "1889")]),
        ({"knowledgeGraph": GRAPH}, [("Paris", GRAPH_TEXT)]),
        ({"knowledgeGraph": {"title": "Paris", "type": "City"}}, [("Paris", "City")]),
        ({"knowledgeGraph": {"title": "Paris"}}, []),
        ({"peopleAlsoAsk": ASKED, "organic": []}, [("Builder", "Eiffel.")]),
        (organic("one", peopleAlsoAsk=ASKED), [("T0", "one")]),
        (
            organic("one", "two", answerBox=BOX, knowledgeGraph=GRAPH),
            [("Tower", "Built in 1889."), ("Paris", GRAPH_TEXT), ("T0", "one")],
        ),
        (organic("Built in\n1889.", "two", answerBox=BOX), [("Tower", "Built in 1889."), ("T1", "two")]),
        (organic("one", answerBox={"link": "x"}, knowledgeGraph=7), [("T0", "one")]),
        (organic("one", answerBox=[], knowledgeGraph={"attributes": ["x"]}), [("T0", "one")]),
        ({"answerBox": BOX, "organic": None}, [("Tower", "Built in 1889.")]),
        ({"searchParameters": {}, "answerBox": None, "peopleAlsoAsk": "x"}, []),
    ],
)
def test_answers_beside_the_organic_results(answer: dict[str, Any], found: list[tuple[str, str]]) -> None:
    passages, _ = search(answer)
    assert [tuple(to_passage(passage)) for passage in passages] == found


@pytest.mark.parametrize("answer", [organic(), {"searchParameters": {"q": "x"}}, {"organic": []}])
def test_no_results_is_no_failure(answer: dict[str, Any]) -> None:
    assert search(answer)[0] == []


@pytest.mark.parametrize(
    "answer",
    [{}, {"message": "Not enough credits"}, {"error": "x"}, {"organic": None}, {"organic": {}}, [], None, "<html>"],
)
def test_other_answers_are_errors(answer: Any) -> None:
    with pytest.raises(SearchError) as caught:
        search(answer)
    assert caught.value.kind == "response"


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (401, "status", False),
        (403, "status", False),
        (429, "rate_limit", True),
        (500, "status", True),
    ],
)
def test_status(status: int, kind: str, retryable: bool) -> None:
    with pytest.raises(SearchError, match=f"status {status}") as caught:
        search({"message": "no"}, status=status)
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)


def test_a_query_that_is_refused_is_no_failure() -> None:
    with pytest.raises(QueryError, match="status 400") as caught:
        search({"message": f"Query not allowed for {KEY}", "statusCode": 400}, status=400)
    assert caught.value.reason == "Query not allowed for ***"


def test_credits_that_are_spent_are_no_fault_of_the_query() -> None:
    with pytest.raises(SearchError, match="Not enough credits") as caught:
        search({"message": "Not enough credits", "statusCode": 400}, status=400)
    assert not caught.value.retryable


def test_what_cannot_be_read_of_a_query_is_not_sent() -> None:
    with pytest.raises(QueryError, match="blank"):
        asyncio.run(google_search(KEY, "\ud800\0", serper_url="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("answer", "status"),
    # The last: cut in the middle of the key, were it not hidden before.
    [(KEY, 500), ({"message": f"key {KEY} is bad"}, 401), (KEY, 200), ("." * (198 - len(KEY) // 2) + KEY, 500)],
)
def test_the_key_is_never_told(answer: Any, status: int, caplog: pytest.LogCaptureFixture) -> None:
    """Not even where the server echoes it."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(SearchError) as caught:
        search(answer, status=status)
    error: BaseException | None = caught.value
    while error is not None:
        assert KEY[: len(KEY) // 2] not in f"{error!s} {error!r}"
        error = error.__cause__ or error.__context__
    assert KEY not in caplog.text


# --- Pages ---


@pytest.fixture
def local_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local server stands for the public internet."""
    monkeypatch.setattr(pages, "is_public", lambda address: True)


def search_pages(routes: dict[str, Callable[[web.Request], Any]], snippet: str, **options: Any) -> list[str]:
    """The texts of the passages for results that link to each of the routes, `snippet_only` off."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/search":
            links = [f"http://{request.host}{path}" for path in routes if not path.startswith("/hidden")]
            results = [
                {"title": path, "link": link, "snippet": snippet} for path, link in zip(routes, links, strict=False)
            ]
            return web.json_response({"organic": results})
        return await routes[request.path](request)

    async def run() -> list[dict[str, Any]]:
        async with serving(handler, "/search") as url:
            return await google_search(KEY, "q", 10, snippet_only=False, serper_url=url, **options)

    return [to_passage(passage).text for passage in asyncio.run(run())]


def page(body: bytes, content_type: str = "text/html", status: int = 200) -> Callable[[web.Request], Any]:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status, headers={"Content-Type": content_type})

    return handler


@pytest.mark.usefixtures("local_is_public")
@pytest.mark.parametrize("charset", TEXTS)
@pytest.mark.parametrize("told", ["header", "meta", "nowhere"])
def test_charsets(charset: str, told: str) -> None:
    text = TEXTS[charset]
    body = html(text, charset) if told == "meta" else html(text).decode().encode(charset)
    content_type = f"text/html; charset={charset}" if told == "header" else "text/html"
    assert search_pages({"/a": page(body, content_type)}, text[:20] + " ...") == [text]


@pytest.mark.usefixtures("local_is_public")
def test_what_cannot_be_read_leaves_the_snippet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_SECONDS", 1.5)
    text = TEXTS["utf-8"]

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(3)
        raise AssertionError("the client had given up")

    async def redirects_for_ever(request: web.Request) -> web.Response:
        raise web.HTTPFound("/for-ever")

    async def redirects(request: web.Request) -> web.Response:
        raise web.HTTPFound("/good")

    routes = {
        "/good": page(html(text)),
        "/redirects": redirects,
        "/pdf": page(html(text), "application/pdf"),
        "/404": page(html(text), status=404),
        "/slow": slow,
        "/for-ever": redirects_for_ever,
        "/empty": page(b""),
        "/junk": page(bytes(range(256)) * 50),
        "/other": page(html("Something else entirely, in a paragraph that is as long as the others on this page.")),
    }
    snippet = "largest city of Switzerland"
    assert search_pages(routes, snippet) == [text, text] + [snippet] * 7


@pytest.mark.usefixtures("local_is_public")
def test_a_huge_page_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 200_000)
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "text/html"})
        await response.prepare(request)
        await response.write(html(TEXTS["utf-8"]).replace(b"</article></body></html>", b""))
        while sent < 50_000_000:
            await response.write(b"<p>more</p>" * 1000)
            sent += 11_000
        return response

    assert search_pages({"/a": endless}, "largest city of Switzerland") == [TEXTS["utf-8"]]
    assert sent < 50_000_000


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]"])
def test_a_link_never_reaches_the_local_network(host: str) -> None:
    reached = []

    async def handler(request: web.Request) -> web.Response:
        reached.append(request.path)
        if request.path == "/search":
            port = request.host.rsplit(":", 1)[1]
            return web.json_response(
                organic("s") | {"organic": [{"link": f"http://{host}:{port}/secret", "snippet": "s"}]}
            )
        return web.Response(body=html("s"), content_type="text/html")

    async def run() -> list[dict[str, Any]]:
        async with serving(handler, "/search") as url:
            return await google_search(KEY, "q", snippet_only=False, serper_url=url)

    assert to_passage(asyncio.run(run())[0]).text == "s"
    assert reached == ["/search"]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://example.com/", "http://169.254.169.254/latest", "//x", "", "http:///a"]
)
def test_links_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected an http|not a public"):
        asyncio.run(check_public(URL(url)))


@pytest.mark.parametrize("url", ["http://localhost/", "http://intranet/", "http://127.0.0.1/"])
def test_links_that_are_refused_behind_a_proxy(url: str) -> None:
    with pytest.raises(ValueError, match="not a public"):
        asyncio.run(check_public(URL(url), proxy="http://proxy:3128"))


@pytest.mark.usefixtures("local_is_public")
def test_pages_do_not_go_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert search_pages({"/a": page(html(TEXTS["utf-8"]))}, "largest city of Switzerland") == [TEXTS["utf-8"]]


# --- Reading ---


def test_context_where_whitespace_differs() -> None:
    text = "The Eiffel Tower\n      was built   in 1889 by&nbsp;Gustave Eiffel for the world's fair held in Paris."
    context = snippet_context(
        html(text).decode(), "Mar 3, 2020 — the eiffel tower was built in 1889 by Gustave ... held in Paris"
    )
    assert context == "The Eiffel Tower was built in 1889 by Gustave Eiffel for the world's fair held in Paris."


def test_context_of_several_fragments() -> None:
    one = "The first fact is that the tower is made of iron, as one sees from afar."
    two = "The second fact is that it was meant to stand for twenty years and no longer."
    page_html = html(f"{one}</p>{FILLER}<p>{two}").decode()
    assert snippet_context(page_html, "the tower is made of iron ... meant to stand for twenty") == f"{one}\n{two}"
    assert snippet_context(page_html, "nothing of this kind") is None


def test_a_long_paragraph_is_cut_at_words() -> None:
    text = "word " * 2000 + "the needle in it " + "word " * 2000
    context = snippet_context(html(text).decode(), "the needle in it")
    assert context is not None
    assert "the needle in it" in context
    assert len(context) <= 2 * CONTEXT_CHARS + 20
    assert set(context.split()) == {"word", "the", "needle", "in", "it"}


@pytest.mark.parametrize(
    ("data", "charset", "expected"),
    [
        (b"\xef\xbb\xbfcaf\xc3\xa9", "latin-1", "café"),
        ("café".encode("utf-16"), None, "café"),
        (b"caf\xc3\xa9", "iso-8859-1", "café"),  # declared wrongly
        (b"caf\xe9", "iso-8859-1", "café"),
        (b"\x93hi\x94", "iso-8859-1", "“hi”"),
        (TEXTS["windows-1251"].encode("cp1251"), "utf-8", "Москва"),
        (TEXTS["gb18030"].encode("gbk"), "no-such-charset", "北京"),
        (b"Paris est la capitale de la France", "base64", "Paris"),
        (b"caf\xe9", "base64", "caf"),
        ("東京".encode("iso2022_jp"), "iso-2022-jp", "東京"),
        (b"", None, ""),
    ],
)
def test_decoding(data: bytes, charset: str | None, expected: str) -> None:
    assert decode_page(data, charset).startswith(expected)


@pytest.mark.parametrize(
    ("charset", "text"),
    [
        ("big5", "臺北是中華民國的首都，也是台灣的政治、經濟與文化中心。"),
        ("euc-jp", "東京は日本の首都であり、世界最大級の都市圏を形成している。"),
        ("koi8-r", "Москва является столицей России и крупнейшим городом страны."),
        ("windows-1253", "Η Αθήνα είναι η πρωτεύουσα και μεγαλύτερη πόλη της Ελλάδας."),
        ("windows-1254", "İstanbul, Türkiye'nin en kalabalık şehridir ve ekonomik başkenti."),
        ("windows-1255", "ירושלים היא עיר הבירה של מדינת ישראל והעיר הגדולה בה"),
        ("windows-1256", "القاهرة هي عاصمة جمهورية مصر العربية وأكبر مدنها"),
        ("tis-620", "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย"),
        ("iso-8859-1", "São Paulo é a maior cidade do Brasil e o principal centro econômico do país."),
        ("windows-1252", "The café’s menu — “crème brûlée” and more"),
    ],
)
def test_a_charset_that_no_one_tells_is_found_beside_much_ascii(charset: str, text: str) -> None:
    assert text in decode_page(html(text).decode().encode(charset))


def test_decoding_of_a_page_that_was_cut() -> None:
    assert decode_page("東京".encode()[:-1], cut=True) == "東"
    assert decode_page("東京".encode("euc-jp")[:-1], "euc-jp", cut=True) == "東"
