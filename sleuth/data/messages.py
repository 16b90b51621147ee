"""Reads the prompt and the tools of a row: checks them, and brings them into the form that chat templates expect.

A prompt is a text, or a list of messages with role and content; the list may also be written out as JSON or Python.
Content may be a list of text parts. Nothing here knows tokenizers.
"""

from __future__ import annotations

import ast
import json
from typing import Any

Message = dict[str, Any]
Prompt = str | list[Message]


def read_prompt(value: Any, where: str, *, padded: bool = False) -> Prompt:
    """The prompt in `value`: a text, or messages whose content is a text.

    `where` names row and column in errors. `padded`: nulls inside dictionaries are Arrow's padding and are dropped.
    Raises ValueError if `value` is not a prompt.
    """
    if isinstance(value, str) and value:
        found = decoded(value)
        if not _are_messages(found):
            return value
        value, padded = found, False
    if not _are_messages(value):
        raise ValueError(
            f"expected a text or a list of messages with role and content in {where}, found {_short(value)}"
        )
    return [_message(message, f"message {i} of {where}", padded) for i, message in enumerate(value, start=1)]


def read_tools(value: Any, where: str, *, padded: bool = False) -> list[Message] | None:
    """The tools in `value`: a list of JSON objects; objects or the whole list may be JSON text. None if there are none.

    `where` and `padded` as in `read_prompt`. Raises ValueError if `value` is anything else.
    """
    if isinstance(value, str):
        value, padded = None if value.strip() in ("", "null") else decoded(value), False
    if value is None or value == []:
        return None
    tools = [_tool(tool, padded) for tool in value] if isinstance(value, list) else []
    if not tools or not all(isinstance(tool, dict) and tool for tool in tools):
        raise ValueError(
            f"expected a list of tools (JSON objects that describe functions), or its JSON text, in {where}, "
            f"found {_short(value)}"
        )
    return tools


def _tool(tool: Any, padded: bool) -> Any:
    if isinstance(tool, str):
        return decoded(tool)
    return without_padding(tool) if padded else tool


def without_padding(value: Any) -> Any:
    """`value` without the nulls that Arrow puts into dictionaries for keys which only other rows have."""
    if isinstance(value, dict):
        return {key: without_padding(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_padding(item) for item in value]
    return value


def decoded(text: str) -> Any:
    """The list or dictionary if the text is one in JSON or Python notation, else the text itself."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    for read in (json.loads, ast.literal_eval):  # pandas writes lists into CSV files as Python does
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return "content" in value or bool(value.get("tool_calls"))


def _message(message: Message, where: str, padded: bool) -> Message:
    content = message.get("content")
    plain = without_padding(message) if padded else message
    if isinstance(content, list) and content:
        content = "".join(_part(part, where) for part in content)
    calls_tools = message["role"] == "assistant" and bool(plain.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and calls_tools):
        raise ValueError(
            f"expected a text or a list of text parts as the content of {where}, found {_short(content)}; "
            "only an assistant's message with tool_calls may have none"
        )
    return {**plain, "content": content}


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError(f"expected parts {{'type': 'text', 'text': str}} in the content of {where}, found {_short(part)}")


def _short(value: Any) -> str:
    return f"{value!r:.200}"
