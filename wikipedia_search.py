"""Wikipedia without a key: its full-text search, and the introductions of the pages found.

    passages = await wikipedia_search("capital of France", 3, contact="you@example.org")

One request a search: https://www.mediawiki.org/wiki/API:Search as a generator, with
https://www.mediawiki.org/wiki/Extension:TextExtracts, as https://en.wikipedia.org/w/api.php?action=help describes them.
Whoever asks names themselves, https://foundation.wikimedia.org/wiki/Policy:Wikimedia_Foundation_User-Agent_Policy, and
asks little at a time, https://www.mediawiki.org/wiki/API:Etiquette.

A failure is a `SearchError` after its retries, never an empty list; a query that is refused is a `QueryError`.
"""

from __future__ import annotations

import os
from typing import Any

import aiohttp
from pydantic import Field

from sleuth.search import Backend, QueryError, SearchError, clean_query, request_text, with_search_retries
from sleuth.search.web import WebSettings, list_under, one_line, read_json, web_passages

API_URL = "https://{language}.wikipedia.org/w/api.php"
MOST_PAGES = 20
"""Introductions in one answer."""
MOST_CHARACTERS = 1200
"""Of an introduction: the most the API gives."""
MAX_LAG_SECONDS = 5
"""Where the servers' copies lag more, the API asks to come back later."""
BUSY = ("maxlag", "ratelimited", "readonly", "internal_api_error")
"""How codes of errors begin that another attempt may not meet."""


class WikipediaSettings(WebSettings):
    """The part `wikipedia` of a search hook's settings. `contact`: an e-mail address or a page, for Wikipedia only."""

    language: str = Field(default="en", pattern=r"^[a-z][a-z-]*$")
    contact: str | None = None
    url: str = API_URL  # any MediaWiki with the extension TextExtracts
    concurrency: int = Field(default=3, ge=1)
    timeout: float = Field(default=15.0, gt=0)

    def backend(self, topk: int, timeout: float, retries: int) -> Backend:
        """What searches for one query; `timeout` in seconds an attempt. ValueError where nobody is named."""
        contact = (self.contact or os.environ.get("WIKIPEDIA_CONTACT", "")).strip()
        if not contact.isprintable() or not contact:
            raise ValueError(
                "search_backend wikipedia: Wikipedia asks to be told whom to write to, an address on one line; export "
                "WIKIPEDIA_CONTACT=you@example.org, or set wikipedia.contact"
            )
        url = self.url.replace("{language}", self.language)
        return lambda query: wikipedia_search(
            query, topk, timeout, self.proxy, contact=contact, retries=retries, url=url
        )


async def wikipedia_search(
    query: str,
    top_k: int = 3,
    timeout: float = 15.0,
    proxy: str | None = None,
    *,
    contact: str,
    retries: int = 3,
    url: str = API_URL.replace("{language}", "en"),
) -> list[dict[str, str]]:
    """Up to `top_k` passages, best first: `[{"title", "text"}]`; 20 at most. `timeout`: seconds an attempt.

    Raises QueryError if the query is blank or refused, SearchError after `retries` further attempts, or at once where
    another attempt cannot help.
    """
    pages = min(top_k, MOST_PAGES)
    params: dict[str, str | int] = {
        **{"action": "query", "format": "json", "formatversion": 2, "utf8": 1, "maxlag": MAX_LAG_SECONDS},
        **{"generator": "search", "gsrsearch": clean_query(query), "gsrlimit": pages},
        **{"prop": "extracts", "exintro": 1, "explaintext": 1, "exlimit": "max", "exchars": MOST_CHARACTERS},
    }
    agent = f"sleuth-search/1.0 ({contact}) aiohttp/{aiohttp.__version__}"

    async def attempt() -> list[dict[str, str]]:
        # A form, since an address must not be as long as a query can be.
        text = await request_text("POST", url, timeout=timeout, data=params, headers={"User-Agent": agent}, proxy=proxy)
        return web_passages(parse_pages(text, url), pages)

    return await with_search_retries(attempt, retries)


def parse_pages(text: str, source: str) -> list[tuple[Any, Any, Any, Any]]:
    """Title and introduction of the pages, best first. QueryError or SearchError for an error, which comes as a 200."""
    body = read_json(text, source)
    if isinstance(error := body.get("error"), dict):
        code, message = str(error.get("code")), f"{source}: {error.get('code')}: {one_line(error.get('info'))[:200]}"
        if "query" in code or "search" in code:  # cirrussearch-query-too-long, for one
            raise QueryError(message, one_line(error.get("info"))[:200])
        busy = code.startswith(BUSY)
        limited = code in ("maxlag", "ratelimited")
        raise SearchError(message, "rate_limit" if limited else "response", retryable=busy)
    if "query" not in body and "batchcomplete" in body:  # nothing found
        return []
    pages = list_under(body, "query.pages", source)
    pages.sort(key=lambda page: page["index"] if isinstance(page.get("index"), int) else len(pages))
    return [(page.get("title"), page.get("extract"), None, None) for page in pages]
