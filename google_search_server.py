"""The client of Google through serper.dev: snippets from its JSON and, if wanted, the pages behind them.

    passages = await google_search(api_key, "capital of France", top_k=3)

As in `local_search_server.py`, a failure after all retries is a `SearchError`, never an empty list, and a refused
query is a `QueryError`.

Passages are, in this order, the answer box, the knowledge graph's entry and the organic results with a snippet; if
there are none of these, the questions that people also ask.

The API key is sent in a header only; no message or log contains it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator

from sleuth.hooks import SettingsPart
from sleuth.search import Backend, QueryError, SearchError, clean_query, request_text, with_search_retries
from sleuth.search.addresses import check_proxy_url
from sleuth.search.pages import page_contexts

SERPER_URL = "https://google.serper.dev/search"
FEWEST_RESULTS = 10
"""Asked for at least: serper costs the same up to ten, and some results have no snippet."""


def _named(value: str) -> str:
    if not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("a key belongs in an environment variable: give its name, as in env:SERPER_API_KEY")
    return value


class GoogleSettings(SettingsPart):
    """The part `google` of a search hook's settings. It holds the name of the API key's variable, never the key."""

    api_key: Annotated[str, AfterValidator(_named)]
    snippet_only: bool
    proxy: Annotated[str, AfterValidator(check_proxy_url)] | None

    def key(self) -> str:
        """The API key; ValueError if the environment does not hold it."""
        name = self.api_key.removeprefix("env:")
        key = os.environ.get(name, "").strip()  # a file's last line end would break the header
        if not key:
            raise ValueError(
                f"search_backend google needs a serper.dev key in {name}; export {name}=... and start again"
            )
        return key

    def backend(self, topk: int, timeout: float, retries: int) -> Backend:
        """The function that searches for a query; `timeout` in seconds per attempt. ValueError if there is no key."""
        key = self.key()
        return lambda query: google_search(key, query, topk, timeout, self.proxy, self.snippet_only, retries=retries)


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
    """Up to `top_k` passages for the query, best first: `[{"document": {"contents": '"title"\\ntext'}}]`.

    `timeout`: seconds that an attempt may take. `proxy`: the proxy to use; those of the environment are ignored. Raises
    QueryError if the query is blank or refused; SearchError after `retries` retries, or at once if another attempt
    cannot help (for example if the key is refused). Without `snippet_only` the pages are fetched, and passages are the
    text around the snippets; if that fails, the snippets themselves.
    """
    url = serper_url or SERPER_URL
    body = {"q": clean_query(query), "num": max(top_k, FEWEST_RESULTS)}

    async def attempt() -> list[dict[str, str]]:
        headers = {"X-API-KEY": api_key}
        options = {"json": body, "headers": headers, "proxy": proxy}
        # Errors quote the beginning of an answer, which may quote the key.
        try:
            text = await request_text("POST", url, timeout=timeout, hidden=api_key, **options)
        except QueryError as error:
            if "not enough credits" in error.reason.lower():  # a 400 that no query causes
                raise SearchError(str(error), "status") from None
            raise
        return parse_results(text, url)

    results = (await with_search_retries(attempt, retries))[:top_k]
    texts = [result["snippet"] for result in results]
    if not snippet_only:
        contexts = await page_contexts([result["link"] for result in results], texts, proxy=proxy)
        texts = [context or snippet for context, snippet in zip(contexts, texts, strict=True)]
    return [
        {"document": {"contents": f'"{result["title"]}"\n{text}'}} for result, text in zip(results, texts, strict=True)
    ]


def parse_results(text: str, source: str) -> list[dict[str, str]]:
    """The results: title, link ("" if there is no page to read) and snippet; SearchError if `text` is not an answer."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise SearchError(f"{source}: expected JSON, found {text[:200]!r}", "response") from None
    if not isinstance(body, dict):
        body = {}
    # An answer without results still repeats the query; an error does not.
    is_answer = body.keys() & {"searchParameters", "answerBox", "knowledgeGraph", "peopleAlsoAsk"}
    organic = [] if is_answer and body.get("organic") is None else body.get("organic")
    if not isinstance(organic, list):
        raise SearchError(f"{source}: expected a list 'organic', found {text[:200]!r}", "response")
    answers = [*_answer_box(body.get("answerBox")), *_knowledge_graph(body.get("knowledgeGraph"))]
    told = {answer["snippet"] for answer in answers}  # the answer is often an organic result's, word for word
    found = [*answers, *(result for result in _with_snippet(organic) if result["snippet"] not in told)]
    asked = body.get("peopleAlsoAsk")
    return found or _with_snippet(asked if isinstance(asked, list) else [])


def _with_snippet(items: list[Any]) -> list[dict[str, str]]:
    results = [
        {key: _text(item.get(key)) for key in ("title", "link", "snippet")} for item in items if isinstance(item, dict)
    ]
    return [result for result in results if result["snippet"]]


def _answer_box(box: Any) -> Iterator[dict[str, str]]:
    """The direct answer, with or without the sentence it was taken from."""
    if not isinstance(box, dict):
        return
    answer, snippet = _value(box.get("answer")), _text(box.get("snippet"))
    if text := " ".join(filter(None, [answer, snippet])) or _value(box.get("snippetHighlighted")):
        # A page is read around a snippet only: an answer may stand anywhere in it.
        yield {"title": _text(box.get("title")), "link": "" if answer else _text(box.get("link")), "snippet": text}


def _knowledge_graph(entry: Any) -> Iterator[dict[str, str]]:
    """The kind, description and attributes of an entry, each on a line."""
    if not isinstance(entry, dict):
        return
    attributes = entry.get("attributes")
    pairs = attributes.items() if isinstance(attributes, dict) else ()
    facts = [f"{name}: {text}" for name, value in pairs if (text := _value(value))]
    if lines := [*filter(None, [_text(entry.get("type")), _text(entry.get("description"))]), *facts]:
        yield {"title": _text(entry.get("title")), "link": "", "snippet": "\n".join(lines)}


def _value(value: Any) -> str:
    """A text, a number, or several of them in a list; "" for anything else."""
    if isinstance(value, list):
        return "; ".join(filter(None, (_value(item) for item in value if not isinstance(item, list))))
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else _text(value)


def _text(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""
