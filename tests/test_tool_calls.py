"""Calls as models write them, right and wrong."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sleuth.tool_calls import ToolCall, parse_tool_calls, without_thoughts


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


PARIS = ToolCall("search", {"query": "Paris"})
JSON = '{"name": "search", "arguments": {"query": "Paris"}}'
FUNCTION = "<function=search>\n<parameter=query>\nParis\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is Paris.", []),
        ("", []),
        (call(JSON), [PARIS]),
        (f"I shall look.\n{call(JSON)}", [PARIS]),
        (f"Answer: Paris {call(JSON)} for sure", [PARIS]),
        (call(r'{"name": "search", "arguments": "{\"query\": \"Paris\"}"}'), [PARIS]),
        (call('{"name": "search", "parameters": {"query": "Paris"}}'), [PARIS]),
        (call(FUNCTION), [PARIS]),
        (f"<tool_call>{FUNCTION}</tool_call>", [PARIS]),
        (call("<function=search><parameter=query>Paris</parameter></function>"), [PARIS]),
        (call(JSON) + call(FUNCTION), [PARIS, PARIS]),
        (call(JSON) * 40, [PARIS] * 40),
        # Thoughts do not act.
        (f"<think>{call(JSON)}</think>It is Paris.", []),
        (f"<think>{call(JSON)}", []),
        (f"<think>a</think>{call(JSON)}<think>{call(JSON)}</think>", [PARIS]),
        (call('{"name": "search", "arguments": {"query": "<think>"}}'), [ToolCall("search", {"query": "<think>"})]),
        # Llama's: the whole turn is a call.
        ('{"name": "search", "parameters": {"query": "Paris"}}', [PARIS]),
        ('<|python_tag|>{"name": "search", "parameters": {"query": "Paris"}}', [PARIS]),
        ('{"answer": "Paris"}', []),
        ('{"name": "Paris"}', []),
        ('I write {"name": "search", "parameters": {"query": "Paris"}}', []),
        # Texts of several lines, and arguments of other types.
        (
            call("<function=search><parameter=query>\na\nb\n</parameter><parameter=k>\n1\n</parameter></function>"),
            [ToolCall("search", {"query": "a\nb", "k": "1"})],
        ),
        (call('{"name": "x", "arguments": {}}'), [ToolCall("x", {})]),
    ],
)
def test_calls(text: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"<tool_call>{JSON}", "is not closed"),
        (call("search Paris"), "one JSON object"),
        (call(JSON[:-1]), "one JSON object"),
        (call(JSON + JSON), "one JSON object"),
        (call(""), "one JSON object"),
        (call("[" * 100_000), "one JSON object"),
        (call("[1]"), '"name" and "arguments"'),
        (call('{"name": 7, "arguments": {}}'), '"name" and "arguments"'),
        (call('{"arguments": {"query": "Paris"}}'), '"name" and "arguments"'),
        (call('{"name": "search"}'), '"arguments" as a JSON object'),
        (call('{"name": "search", "arguments": "Paris"}'), '"arguments" as a JSON object'),
        (call('{"name": "search", "arguments": "[1]"}'), '"arguments" as a JSON object'),
        (call("<function=search>Paris"), "<function=name>"),
        (call(FUNCTION + "more"), "<function=name>"),
        (call('{"name": "search", "arguments": {"query": "</tool_call>"}}'), "one JSON object"),
    ],
)
def test_calls_that_are_wrong_say_why(text: str, error: str) -> None:
    (found,) = parse_tool_calls(text)
    assert error in (found.error or "")


def test_a_wrong_call_leaves_the_others() -> None:
    assert [found.error is None for found in parse_tool_calls(call("x") + call(JSON) + "<tool_call>")] == [
        False,
        True,
        False,
    ]


@given(query=st.text(), form=st.sampled_from(["object", "string", "llama"]))
def test_any_query_comes_back(query: str, form: str) -> None:
    arguments: Any = {"query": query}
    text = {
        "object": lambda: call(json.dumps({"name": "search", "arguments": arguments})),
        "string": lambda: call(json.dumps({"name": "search", "arguments": json.dumps(arguments)})),
        "llama": lambda: json.dumps({"name": "search", "parameters": arguments}),
    }[form]()
    assert parse_tool_calls(text) == [ToolCall("search", arguments)]


@pytest.mark.parametrize(
    "text", ["<think>", "<tool_call>", "</tool_call>", "<tool_call><function=a>", "<think></think>"]
)
def test_long_turns_take_little_time(text: str) -> None:
    start = time.perf_counter()
    parse_tool_calls(text * 100_000)
    parse_tool_calls(call("<function=a>" + "<parameter=" * 20_000 + "</function>"))
    assert time.perf_counter() - start < 5.0


def test_text_outside_of_thoughts() -> None:
    assert without_thoughts("<think>a</think>b<think>c") == "b"
    assert without_thoughts("a</think>b") == "a</think>b"
