"""DeepSeek's search: `POST {base_url}/v1/tools/search`, with a key.

    passages = await deepseek_search(api_key, "capital of France", 3)

The request is `{"query": ...}` with `Authorization: Bearer`, the answer `{"results": [{"title", "snippet", "summary",
"source", "url"}]}`. This is written from a description of the interface: no public documentation of it was found, and
nobody has run it against the service yet. `base_url` names another host that answers so.

A failure is a `SearchError` after its retries, never an empty list; a query that is refused is a `QueryError`. The key
travels in a header only; no message or log holds it.
"""

from __future__ import annotations

from pydantic import Field

from sleuth.search import Backend, clean_query, request_text, with_search_retries
from sleuth.search.web import WebSettings, environment_key, list_under, read_json, web_passages

KEY_NAMES = ("DEEPSEEK_API_KEY", "DEEPSEEK_KEY")
BASE_URL = "https://api.deepseek.com"


class DeepSeekSettings(WebSettings):
    """The part `deepseek` of a search hook's settings. The key comes from the environment."""

    base_url: str = BASE_URL
    concurrency: int = Field(default=16, ge=1)
    timeout: float = Field(default=60.0, gt=0)

    def backend(self, topk: int, timeout: float, retries: int) -> Backend:
        """What searches for one query; `timeout` in seconds an attempt. ValueError for a missing key."""
        key = environment_key("deepseek", *KEY_NAMES)
        return lambda query: deepseek_search(
            key, query, topk, timeout, self.proxy, retries=retries, base_url=self.base_url
        )


async def deepseek_search(
    api_key: str,
    query: str,
    top_k: int = 3,
    timeout: float = 60.0,
    proxy: str | None = None,
    *,
    retries: int = 3,
    base_url: str = BASE_URL,
) -> list[dict[str, str]]:
    """Up to `top_k` passages, best first: `[{"title", "text"}]`. `timeout`: seconds an attempt.

    Raises QueryError if the query is blank or refused, SearchError after `retries` further attempts, or at once where
    another attempt cannot help (a refused key, for one).
    """
    url = f"{base_url.rstrip('/')}/v1/tools/search"
    options = {
        "json": {"query": clean_query(query)},
        "headers": {"Authorization": f"Bearer {api_key}"},
        "proxy": proxy,
    }

    async def attempt() -> list[dict[str, str]]:
        text = await request_text("POST", url, timeout=timeout, hidden=api_key, **options)
        items = list_under(read_json(text, url), "results", url)
        found = [
            (item.get("title"), item.get("snippet") or item.get("summary"), item.get("source"), item.get("url"))
            for item in items
        ]
        return web_passages(found, top_k)

    return await with_search_retries(attempt, retries)
