"""Zhihu's search of the whole web, with several keys in turn.

    passages = await zhihu_search(Keys(["a", "b"]), "capital of France", 3)

`GET https://developer.zhihu.com/api/v1/content/global_search?Query=...&Count=1..20&SearchDB=all`, with
`Authorization: Bearer` and `X-Request-Timestamp`; the answer is `{"Code": 0, "Data": {"Items": [{"Title",
"ContentText", "Url", "ContentType", "AuthorName"}]}}`, as the platform's own page (https://developer.zhihu.com, its
`global_search`) and its public clients have it. Code 30001: too many requests; 30002: the day's quota is spent.

A key that is refused for its rate rests as long as the server asks, and the next one goes on. A failure is a
`SearchError` after its retries, never an empty list. Keys travel in a header only; no message or log holds one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from sleuth.search import Backend, SearchError, clean_query, request_text, with_search_retries
from sleuth.search.web import WebSettings, environment_key, list_under, one_line, read_json, web_passages

SEARCH_URL = "https://developer.zhihu.com/api/v1/content/global_search"
MOST_RESULTS = 20
REST_SECONDS = {30001: 60.0, 30002: 3600.0}
"""How long a key rests by the code of the refusal, where the server does not say."""


class Keys:
    """Keys in turn, without those that rest."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._rested = dict.fromkeys(keys, 0.0)
        """When each key may be used again, by the clock of `time.monotonic`; the next one first."""

    def take(self) -> str:
        """The next key; SearchError, which says how long to wait, if all of them rest."""
        now = time.monotonic()
        for key, rested in self._rested.items():
            if rested <= now:
                self._rested[key] = self._rested.pop(key)  # to the end
                return key
        raise self.limited(f"all {len(self._rested)} keys of zhihu rest after too many requests")

    def rest(self, key: str, seconds: float) -> None:
        """Let a key rest."""
        self._rested[key] = time.monotonic() + seconds

    def limited(self, message: str) -> SearchError:
        """The error for a refusal; it asks to wait until the first key has rested, not at all if one has."""
        wait = max(0.0, min(self._rested.values()) - time.monotonic())
        return SearchError(message, "rate_limit", retryable=True, retry_after=wait)


class ZhihuSettings(WebSettings):
    """The part `zhihu` of a search hook's settings. The keys come from the environment: `ZHIHU_SEARCH_KEYS=a,b,c`."""

    url: str = SEARCH_URL
    concurrency: int = Field(default=1, ge=1)
    timeout: float = Field(default=15.0, gt=0)

    def backend(self, topk: int, timeout: float, retries: int) -> Backend:
        """What searches for one query; `timeout` in seconds an attempt. ValueError for missing keys."""
        names = environment_key("zhihu", "ZHIHU_SEARCH_KEYS").split(",")
        keys = Keys([name.strip() for name in names if name.strip()])
        return lambda query: zhihu_search(keys, query, topk, timeout, self.proxy, retries=retries, url=self.url)


async def zhihu_search(
    keys: Keys,
    query: str,
    top_k: int = 3,
    timeout: float = 15.0,
    proxy: str | None = None,
    *,
    retries: int = 3,
    url: str = SEARCH_URL,
) -> list[dict[str, str]]:
    """Up to `top_k` passages, best first: `[{"title", "text"}]`; 20 at most. `timeout`: seconds an attempt.

    Raises QueryError if the query is blank or refused, SearchError after `retries` further attempts, or at once where
    another attempt cannot help.
    """
    params = {"Query": clean_query(query), "Count": min(top_k, MOST_RESULTS), "SearchDB": "all"}

    async def attempt() -> list[dict[str, str]]:
        key = keys.take()
        headers = {"Authorization": f"Bearer {key}", "X-Request-Timestamp": str(int(time.time()))}
        try:
            text = await request_text(
                "GET", url, timeout=timeout, hidden=key, params=params, headers=headers, proxy=proxy
            )
            return web_passages(parse_items(text, url), top_k)
        except SearchError as error:
            if error.kind != "rate_limit":
                raise
            keys.rest(key, REST_SECONDS[30001] if error.retry_after is None else error.retry_after)
            raise keys.limited(str(error)) from None

    return await with_search_retries(attempt, retries)


def parse_items(text: str, source: str) -> list[tuple[Any, Any, Any, Any]]:
    """Title, text, source and URL of what was found; SearchError for a code that is not 0, and for no answer."""
    body = read_json(text, source)
    if (code := body.get("Code")) != 0:
        message = f"{source}: code {code}: {one_line(body.get('Message'))[:200]}"
        if code in REST_SECONDS:
            raise SearchError(message, "rate_limit", retryable=True, retry_after=REST_SECONDS[code])
        raise SearchError(message, "response")
    return [
        (item.get("Title"), item.get("ContentText"), _origin(item), item.get("Url"))
        for item in list_under(body, "Data.Items", source)
    ]


def _origin(item: dict[str, Any]) -> str:
    """`Answer / Somebody`: what kind of text it is, and whose."""
    return " / ".join(filter(None, (one_line(item.get(key)) for key in ("ContentType", "AuthorName"))))
