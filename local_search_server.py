"""The client of a local retrieval server (`local_dense_retriever/retrieval_server.py`, or any that speaks its JSON).

    passages = await local_search("http://127.0.0.1:8000/retrieve", "capital of France", top_k=3)

A failure is a `SearchError` after its retries, never an empty list: nothing found and nothing answered are different.
"""

from __future__ import annotations

import json
from typing import Any

from sleuth.search import SearchError, request_text, with_search_retries


async def local_search(
    search_url: str,
    query: str,
    top_k: int = 5,
    timeout: float = 60.0,
    proxy: str | None = None,
    *,
    retries: int = 3,
) -> list[dict[str, Any]]:
    """Up to `top_k` passages for the query, best first: `[{"document": {"contents": '"title"\\\\ntext'}}]`.

    `timeout`: seconds an attempt may take. Raises SearchError after `retries` further attempts, or at once
    where another attempt cannot help.
    """
    body = {"queries": [query], "topk": top_k, "return_scores": True}

    async def attempt() -> list[dict[str, Any]]:
        text = await request_text("POST", search_url, timeout=timeout, json=body, proxy=proxy)
        return parse_passages(text, search_url)[:top_k]

    return await with_search_retries(attempt, retries)


def parse_passages(text: str, source: str) -> list[dict[str, Any]]:
    """The passages in a server's answer to one query; SearchError if it is not one."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise SearchError(f"{source}: expected JSON, found {text[:200]!r}", "response") from None
    result = body.get("result") if isinstance(body, dict) else None
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
        raise SearchError(f"{source}: expected 'result' with one list of passages, found {text[:200]!r}", "response")
    return [{"document": {"contents": _contents(item, source)}} for item in result[0]]


def _contents(item: Any, source: str) -> str:
    """A passage's contents, from the document itself or from `{"document": ..., "score": ...}`."""
    document = item.get("document", item) if isinstance(item, dict) else None
    if isinstance(document, dict):
        if isinstance(contents := document.get("contents"), str):
            return contents
        if isinstance(text := document.get("text"), str):
            return f'"{document.get("title") or ""}"\n{text}'
    raise SearchError(f"{source}: expected a passage with 'contents', found {str(item)[:200]!r}", "response")
