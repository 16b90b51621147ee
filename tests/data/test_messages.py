"""What rows may hold as prompt and tools, and what is refused with row and column."""

import json
from typing import Any

import pytest

from sleuth.data.messages import read_prompt, read_tools

WHERE = "row 3 of t.parquet, column 'prompt'"
MESSAGES = [{"role": "system", "content": "be short"}, {"role": "user", "content": "q"}]
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}


def test_messages_written_as_json_or_python_are_decoded_and_other_text_is_not() -> None:
    assert read_prompt(json.dumps(MESSAGES), WHERE) == MESSAGES
    assert read_prompt(f" {MESSAGES} ", WHERE) == MESSAGES
    assert read_tools(str([CALL]), WHERE) == [CALL]
    for text in (
        "['Paris', print(1)]",
        "[1, 2]",
        "[not JSON",
        '{"role": "user", "content": "q"}',
        '[{"role": "user"}]',
        "[]",
        "[" * 9999,
        " ",
    ):
        assert read_prompt(text, WHERE) == text


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "who "}, {"type": "text", "text": "wrote it?", "image": None}]
    assert read_prompt([{"role": "user", "content": parts}], WHERE) == [{"role": "user", "content": "who wrote it?"}]


@pytest.mark.parametrize(
    "content",
    [None, [], 3, {"text": "q"}, [{"type": "image", "image": "a.png"}], ["q"], [{"type": "text", "text": None}]],
)
def test_other_content_is_refused_with_row_and_column(content: Any) -> None:
    messages = [*MESSAGES, {"role": "user", "content": content}]
    with pytest.raises(ValueError, match=r"expected .* content of message 3 of row 3 of t.parquet, column 'prompt'"):
        read_prompt(messages, WHERE)


def test_only_an_assistant_that_calls_tools_may_say_nothing() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert read_prompt([*MESSAGES, calls], WHERE) == [*MESSAGES, calls]
    without_key = {"role": "assistant", "tool_calls": [CALL]}
    assert read_prompt([*MESSAGES, without_key], WHERE)[-1] == calls
    for wrong in ({**calls, "role": "user"}, {**calls, "tool_calls": None}, {**calls, "tool_calls": []}):
        with pytest.raises(ValueError, match="only an assistant's message with tool_calls may have none"):
            read_prompt([*MESSAGES, wrong], WHERE)


def test_padding_of_messages_is_dropped_only_where_there_is_some() -> None:
    message = {"role": "user", "content": "q", "tool_calls": None, "name": None}
    assert read_prompt([message], WHERE, padded=True) == [{"role": "user", "content": "q"}]
    assert read_prompt([message], WHERE) == [message]
    assert read_prompt(json.dumps([message]), WHERE, padded=True) == [message]


def test_padding_of_tools_is_dropped_only_where_there_is_some() -> None:
    city = {"type": "string", "enum": ["Paris", None]}
    padded = [{"name": "weather", "parameters": {"properties": {"city": city, "day": None}, "required": None}}]
    bare = [{"name": "weather", "parameters": {"properties": {"city": city}}}]
    assert read_tools(padded, WHERE, padded=True) == bare
    assert read_tools(padded, WHERE) == padded
    assert read_tools(json.dumps(padded), WHERE, padded=True) == padded
    assert read_tools([json.dumps(padded[0])], WHERE, padded=True) == padded


def test_rows_without_tools() -> None:
    assert [read_tools(nothing, WHERE) for nothing in (None, "", [], "[]", "null")] == [None, None, None, None, None]


@pytest.mark.parametrize(
    "tools", ["search", '{"name": "search"}', {"name": "search"}, [1], [{}], ["search"], [None], 3]
)
def test_what_are_no_tools_is_refused_with_its_row(tools: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a list of tools .* in row 3 of t.parquet"):
        read_tools(tools, WHERE)
