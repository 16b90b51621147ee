"""Google through serper.dev: its JSON for the snippets, and the pages behind them where wanted.

    passages = await google_search(api_key, "capital of France", top_k=3)

Like `local_search_server.py`: a failure is a `SearchError` after its retries, never an empty list.
The key travels in a header only; no message or log holds it.
"""

from __future__ import annotations

import json
from typing import Any

from sleuth.search import SearchError, request_text, with_search_retries
from sleuth.search.pages import page_contexts

SERPER_URL = "https://google.serper.dev/search"
FEWEST_RESULTS = 10
"""Asked for at least: serper costs the same up to ten, and some results have no snippet."""


async def google_search(
    api_key: str,
    query: str,
    top_k: int = 5,
    timeout: float = 60.0,
    proxy: str | None = None,
    snippet_only: bool = True,
    *,
    retries: int = 3,
    serper_url: str | None = None,
) -> list[dict[str, Any]]:
    """Up to `top_k` passages for the query, best first: `[{"document": {"contents": '"title"\\\\ntext'}}]`.

    `timeout`: seconds an attempt may take. Raises SearchError after `retries` further attempts, or at once
    where another attempt cannot help (a refused key, for one). Without `snippet_only` the pages are fetched and
    what stands around the snippets is taken; where that fails, the snippet stands.
    """
    url = serper_url or SERPER_URL
    body = {"q": query, "num": max(top_k, FEWEST_RESULTS)}

    async def attempt() -> list[dict[str, str]]:
        headers = {"X-API-KEY": api_key}
        options = {"json": body, "headers": headers, "proxy": proxy}
        # Errors quote the beginning of an answer, which may quote the key.
        text = await request_text("POST", url, timeout=timeout, hidden=api_key, **options)
        return parse_organic(text, url)

    results = (await with_search_retries(attempt, retries))[:top_k]
    texts = [result["snippet"] for result in results]
    if not snippet_only:
        contexts = await page_contexts([result["link"] for result in results], texts, proxy=proxy)
        texts = [context or snippet for context, snippet in zip(contexts, texts, strict=True)]
    return [
        {"document": {"contents": f'"{result["title"]}"\n{text}'}} for result, text in zip(results, texts, strict=True)
    ]


def parse_organic(text: str, source: str) -> list[dict[str, str]]:
    """The organic results with a snippet, as title, link ("" if none) and snippet; SearchError if it is no answer."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise SearchError(f"{source}: expected JSON, found {text[:200]!r}", "response") from None
    if not isinstance(body, dict):
        body = {}
    # An answer without any organic result says so by what was asked; an error payload does not.
    organic = body.get("organic", [] if "searchParameters" in body else None)
    if not isinstance(organic, list):
        raise SearchError(f"{source}: expected a list 'organic', found {text[:200]!r}", "response")
    items = [item for item in organic if isinstance(item, dict) and isinstance(item.get("snippet"), str)]
    return [
        {key: _text(item.get(key)) for key in ("title", "link", "snippet")} for item in items if item["snippet"].strip()
    ]


def _text(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""
