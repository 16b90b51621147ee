"""A SearXNG instance of one's own, which asks many search engines; no key.

    passages = await searxng_search("http://127.0.0.1:8080/search", "capital of France", 3)

`POST /search` with `q` and `format=json`, as https://docs.searxng.org/dev/search_api.html describes it; the instance
must allow the format (`search.formats` in its settings.yml). The answer is `{"results": [{"title", "content", "url",
"engine"}], "unresponsive_engines": [[name, why], ...]}`.

A failure is a `SearchError` after its retries, never an empty list: where engines did not answer and nothing was
found, that is a failure. A query that is refused is a `QueryError`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from local_search_server import check_search_url
from sleuth.search import Backend, SearchError, clean_query, request_text, with_search_retries
from sleuth.search.web import WebSettings, list_under, read_json, web_passages


class SearxngSettings(WebSettings):
    """The part `searxng` of a search hook's settings."""

    search_url: Annotated[str, AfterValidator(check_search_url)] = "http://127.0.0.1:8080/search"
    engines: str | None = None  # "duckduckgo,wikipedia": only these
    language: str | None = None
    concurrency: int = Field(default=8, ge=1)
    timeout: float = Field(default=15.0, gt=0)

    def backend(self, topk: int, timeout: float, retries: int) -> Backend:
        """What searches for one query; `timeout` in seconds an attempt."""
        choice = {"engines": self.engines, "language": self.language}
        params = {name: value for name, value in choice.items() if value}
        return lambda query: searxng_search(
            self.search_url, query, topk, timeout, self.proxy, retries=retries, params=params
        )


async def searxng_search(
    search_url: str,
    query: str,
    top_k: int = 3,
    timeout: float = 15.0,
    proxy: str | None = None,
    *,
    retries: int = 3,
    params: dict[str, str] | None = None,
) -> list[dict[str, str]]:
    """Up to `top_k` passages, best first: `[{"title", "text"}]`. `timeout`: seconds an attempt.

    `params`: further ones of the API, such as `engines`. Raises QueryError if the query is blank or refused,
    SearchError after `retries` further attempts, or at once where another attempt cannot help.
    """
    form = {**(params or {}), "q": clean_query(query), "format": "json"}

    async def attempt() -> list[dict[str, str]]:
        try:
            text = await request_text("POST", search_url, timeout=timeout, data=form, proxy=proxy)
        except SearchError as error:
            if "status 403" not in str(error):
                raise
            raise SearchError(f"{error}; does its settings.yml list json under search.formats?", "status") from None
        body = read_json(text, search_url)
        found = [
            (item.get("title"), item.get("content"), item.get("engine"), item.get("url"))
            for item in list_under(body, "results", search_url)
        ]
        if not found and (silent := body.get("unresponsive_engines")):
            raise SearchError(f"{search_url}: engines gave no answer: {silent!r:.200}", "response", retryable=True)
        return web_passages(found, top_k)

    return await with_search_retries(attempt, retries)
