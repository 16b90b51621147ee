"""The client of a local retrieval server (`local_dense_retriever/retrieval_server.py`, or any that speaks its JSON).

    passages = await local_search("http://127.0.0.1:8000/retrieve", "capital of France", top_k=3)

A failure after all retries is a `SearchError`, never an empty list: a search that found nothing is not a failure.
A query that the server refuses is a `QueryError`, because the server itself works.
"""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any

from pydantic import AfterValidator

from sleuth.hooks import SettingsPart
from sleuth.search import Backend, SearchError, clean_query, request_text, with_search_retries
from sleuth.search.addresses import check_proxy_url, check_search_url
from sleuth.search.observation import title_text

START_SERVER = (
    "start one at {} (python local_dense_retriever/retrieval_server.py --corpus_path data/demo/corpus.jsonl.gz "
    "--retriever_name bm25), or name another with --search-url"
)
"""What to do where no server answers at a URL."""


class LocalSettings(SettingsPart):
    """The part `local` of a search hook's settings. Its defaults are in SEARCH_R1_CONFIGS."""

    search_url: Annotated[str, AfterValidator(check_search_url)]
    proxy: Annotated[str, AfterValidator(check_proxy_url)] | None

    def backend(self, topk: int, timeout: float, retries: int) -> Backend:
        """The function that searches for one query; `timeout` in seconds per attempt."""
        return lambda query: local_search(self.search_url, query, topk, timeout, self.proxy, retries=retries)


async def local_search(
    search_url: str,
    query: str,
    top_k: int = 5,
    timeout: float = 60.0,
    proxy: str | None = None,
    *,
    retries: int = 3,
) -> list[dict[str, Any]]:
    """Up to `top_k` passages for the query, best first: `[{"document": {"contents": '"title"\\ntext'}}]`.

    `timeout`: seconds that an attempt may take. `proxy`: the proxy to use; those of the environment are ignored. Raises
    QueryError if the query is blank or refused; SearchError after `retries` retries, or at once if another attempt
    cannot help.
    """
    body = {"queries": [clean_query(query)], "topk": top_k, "return_scores": True}

    async def attempt() -> list[dict[str, Any]]:
        text = await request_text("POST", search_url, timeout=timeout, json=body, proxy=proxy)
        return parse_passages(text, search_url)[:top_k]

    return await with_search_retries(attempt, retries)


def parse_passages(text: str, source: str) -> list[dict[str, Any]]:
    """The passages in a server's answer to one query; SearchError if `text` is not such an answer."""
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
            return f'"{title_text(document.get("title"))}"\n{text}'
    raise SearchError(f"{source}: expected a passage with 'contents', found {reprlib.repr(item)}", "response")
