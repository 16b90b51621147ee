"""What the search APIs of the web answer, as they are documented, and each client asking such a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from deepseek_search import deepseek_search
from searxng_search import searxng_search
from wikipedia_search import wikipedia_search
from zhihu_search import Keys, zhihu_search

KEY = "s3cret-key-0123456789"
Search = Callable[..., Awaitable[list[dict[str, str]]]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The shapes of https://www.mediawiki.org/wiki/API:Search (as a generator) with Extension:TextExtracts,
# https://docs.searxng.org/dev/search_api.html and https://developer.zhihu.com; texts are ours. Nothing public documents
# DeepSeek's.
WIKIPEDIA = {
    "batchcomplete": True,
    "continue": {"gsroffset": 3, "continue": "gsroffset||"},
    "query": {
        "pages": [
            {"pageid": 7, "ns": 0, "title": "Lyon", "index": 2, "extract": "Lyon lies on the Rhône."},
            {"pageid": 9, "ns": 0, "title": "Empty", "index": 3, "extract": ""},
            {"pageid": 5, "ns": 0, "title": "Paris", "index": 1, "extract": "Paris is the\ncapital."},
        ]
    },
}
DEEPSEEK = {
    "results": [
        {"title": "Paris", "snippet": "The capital.", "summary": "Longer.", "source": "Atlas", "url": "http://a.test/"},
        {"title": "Lyon", "snippet": "", "summary": "On the Rhône.", "source": None, "url": "http://b.test/"},
        {"title": "Nothing to read"},
    ]
}
ZHIHU = {
    "Code": 0,
    "Message": "success",
    "Data": {
        "HasMore": False,
        "Items": [
            {
                "Title": "<em>Paris</em>",
                "ContentText": "The <em>capital</em>.",
                "Url": "http://a.test/",
                "ContentType": "Answer",
                "AuthorName": "Li",
            },
            {"Title": "Lyon", "ContentText": "On the Rhône.", "Url": "http://b.test/", "ContentType": "Web"},
        ],
    },
}
SEARXNG = {
    "query": "big cities",
    "number_of_results": 0,
    "results": [
        {"url": "http://a.test/", "title": "Paris", "content": "The capital.", "engine": "brave", "score": 1.0},
        {"url": "http://b.test/", "title": "No text", "content": "", "engine": "brave"},
    ],
    "answers": [],
    "infoboxes": [],
    "unresponsive_engines": [["bing", "timeout"]],
}


def on_wikipedia(url: str, query: str = "big cities", **options: Any) -> Awaitable[list[dict[str, str]]]:
    return wikipedia_search(query, contact="me@a.test", url=url, **options)


def on_deepseek(url: str, query: str = "big cities", **options: Any) -> Awaitable[list[dict[str, str]]]:
    return deepseek_search(KEY, query, base_url=url.removesuffix("/"), **options)


def on_zhihu(url: str, query: str = "big cities", **options: Any) -> Awaitable[list[dict[str, str]]]:
    return zhihu_search(Keys([KEY]), query, url=url, **options)


def on_searxng(url: str, query: str = "big cities", **options: Any) -> Awaitable[list[dict[str, str]]]:
    return searxng_search(f"{url}search", query, **options)


BACKENDS: dict[str, tuple[Search, dict[str, Any], list[tuple[str, str]]]] = {
    "wikipedia": (on_wikipedia, WIKIPEDIA, [("Paris", "Paris is the capital."), ("Lyon", "Lyon lies on the Rhône.")]),
    "deepseek": (
        on_deepseek,
        DEEPSEEK,
        [("Paris", "The capital.\nSource: Atlas\nURL: http://a.test/"), ("Lyon", "On the Rhône.\nURL: http://b.test/")],
    ),
    "zhihu": (
        on_zhihu,
        ZHIHU,
        [
            ("Paris", "The capital.\nSource: Answer / Li\nURL: http://a.test/"),
            ("Lyon", "On the Rhône.\nSource: Web\nURL: http://b.test/"),
        ],
    ),
    "searxng": (on_searxng, SEARXNG, [("Paris", "The capital.\nSource: brave\nURL: http://a.test/")]),
}
NOTHING: dict[str, Any] = {
    "wikipedia": {"batchcomplete": True},
    "deepseek": {"results": []},
    "zhihu": {"Code": 0, "Message": "success", "Data": {"Items": [], "EmptyReason": "none"}},
    "searxng": {"query": "x", "results": [], "unresponsive_engines": []},
}
