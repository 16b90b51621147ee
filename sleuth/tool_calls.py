"""Tool calls as models write them, read from the text of a turn.

    parse_tool_calls('<tool_call>{"name": "search", "arguments": {"query": "Paris"}}</tool_call>')

Three forms: JSON between `<tool_call>` tags (Qwen2.5, Qwen3, Hermes), its arguments an object or a string of JSON;
functions and parameters between the same tags (Qwen3.5); and a turn that is nothing but a JSON object with a name and
parameters (Llama 3.1). What stands in a think block does not count. Linear in the length of the text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_BLOCK = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>(?P<call>.*?)(?P<end></tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*)</function>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: a tool's name and its arguments, or `error`, which says why it is none."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls of a turn in order, broken ones included; none where the turn calls nothing."""
    blocks = [block for block in _BLOCK.finditer(text) if block["call"] is not None]
    if blocks:
        return [_parse_block(block["call"].strip(), closed=bool(block["end"])) for block in blocks]
    whole = without_thoughts(text).strip().removeprefix("<|python_tag|>").strip()
    if whole.startswith("{") and whole.endswith("}"):
        call = _parse_json(whole)
        return [call] if call.error is None else []  # an answer may be JSON too
    return []


def without_thoughts(text: str) -> str:
    """The text outside of think blocks; nothing after one that stays open."""
    return _BLOCK.sub(lambda block: "" if block["call"] is None else block[0], text)


def _parse_block(content: str, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall(error="the call is not closed: expected </tool_call> at its end")
    return _parse_function(content) if content.startswith("<function=") else _parse_json(content)


def _parse_function(content: str) -> ToolCall:
    function = _FUNCTION.fullmatch(content)
    if function is None:
        return ToolCall(error="expected <function=name>...</function> and nothing else in the call")
    return ToolCall(function[1].strip(), _parameters(function[2]))


def _parameters(text: str) -> dict[str, str]:
    """The values between `<parameter=name>` and `</parameter>`, each without the line ends next to the tags."""
    found = {}
    for part in text.split("<parameter=")[1:]:
        name, opened, rest = part.partition(">")
        value, closed, _ = rest.partition("</parameter>")
        if opened and closed:
            found[name.strip()] = value.removeprefix("\n").removesuffix("\n")
    return found


def _parse_json(content: str) -> ToolCall:
    try:
        call = json.loads(content)
    except (ValueError, RecursionError):
        return ToolCall(error='expected one JSON object, as in {"name": ..., "arguments": {...}}')
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error='expected a JSON object with "name" and "arguments"')
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(error='expected "arguments" as a JSON object')
    return ToolCall(call["name"], arguments)
