"""What the clients of search APIs share: keys and limits, JSON answers, passages that say where they come from."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic import Field

from sleuth.hooks.settings import SettingsPart
from sleuth.search.http import SearchError

ENV_FILE = ".env"


class WebSettings(SettingsPart):
    """The part of a search hook's settings that is about one API.

    `concurrency`: requests under way, and `timeout`: seconds an attempt; the hook's `search_concurrency` and
    `search_timeout` bound them too, so that the smaller holds. `proxy`: the only one that is used.
    """

    concurrency: int = Field(default=16, ge=1)
    timeout: float = Field(default=60.0, gt=0)
    proxy: str | None = None


def read_env_file() -> None:
    """Put what `.env` in the working folder says into the environment, which outranks it. No file: nothing happens."""
    if Path(ENV_FILE).is_file():
        from dotenv import load_dotenv

        load_dotenv(ENV_FILE, override=False)


def environment_key(backend: str, *names: str) -> str:
    """The first of these environment variables that is set; ValueError naming them if none is."""
    for name in names:
        if key := os.environ.get(name, "").strip():  # a file's last line end would break a header
            return key
    raise ValueError(
        f"search_backend {backend} expects {' or '.join(names)} in the environment or in {ENV_FILE}, found none; "
        f"export {names[0]}=... and start again"
    )


def read_json(text: str, source: str) -> dict[str, Any]:
    """The JSON object in an answer; SearchError if it is anything else, such as HTML or half an object."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise SearchError(f"{source}: expected a JSON object, found {text[:200]!r}", "response", retryable=True)
    return body


def list_under(body: Any, path: str, source: str) -> list[dict[str, Any]]:
    """The objects in the list under a dotted path; SearchError if there is no list."""
    found = body
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, list):
        raise SearchError(f"{source}: expected a list {path!r}, found {str(body)[:200]!r}", "response")
    return [item for item in found if isinstance(item, dict)]


def one_line(value: Any) -> str:
    """A text on one line and without the marks of a hit; "" for what is no text."""
    return " ".join(re.sub(r"</?em>", "", value).split()) if isinstance(value, str) else ""


def web_passages(items: list[tuple[Any, Any, Any, Any]], top_k: int) -> list[dict[str, str]]:
    """The first `top_k` of (title, text, source, url) that have a text, as passages that end with source and URL."""
    passages = []
    for title, text, source, url in items:
        if content := one_line(text):
            lines = [content, *(f"{name}: {value}" for name, value in (("Source", source), ("URL", url)) if value)]
            passages.append({"title": one_line(title), "text": "\n".join(lines)})
    return passages[:top_k]
