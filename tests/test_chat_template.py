"""What templates put between turns: equal to their own rendering of the whole, wherever that only grows at its end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from generate_with_tools import TOOLS
from sleuth.chat_template import ToolTemplate
from sleuth.search.observation import neutral
from tests.templates import NAMES, tokenizer_of

every_template = pytest.mark.parametrize("name", NAMES)
both_ways = pytest.mark.parametrize("thinking", [False, True])
KEPT = {"qwen2.5": (False, True), "qwen3": (True,), "qwen3.5": (False, True), "llama3.1": (False, True)}
"""With thinking off (False) and on (True): which templates write an old turn as it was generated."""


def template_of(name: str, thinking: bool) -> ToolTemplate:
    return ToolTemplate(tokenizer_of(name), TOOLS, {"enable_thinking": thinking})


def render(name: str, messages: list[dict[str, Any]], thinking: bool) -> str:
    return tokenizer_of(name).apply_chat_template(
        messages, tools=TOOLS, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )


def encode(text: str, name: str) -> list[int]:
    return tokenizer_of(name).encode(text, add_special_tokens=False)


def said(name: str, thinking: bool, text: str) -> str:
    """What a model generates, so that its turn holds `text`: after its thoughts, where the template opens a think."""
    if not thinking or name in ("qwen2.5", "llama3.1"):
        return text
    return f"Thoughts.\n</think>\n\n{text}" if name == "qwen3.5" else f"<think>\nThoughts.\n</think>\n\n{text}"


word = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=8)
plain = st.lists(word, min_size=1, max_size=6).map(" ".join)
content = st.lists(
    st.one_of(word, st.sampled_from(["\n", "<|im_end|>", "</tool_response>", '"', "<think>"])), max_size=8
)


@every_template
@both_ways
@given(rounds=st.lists(st.tuples(plain, st.lists(content.map(" ".join), min_size=1, max_size=3)), max_size=3))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_ids_equal_the_templates_own(name: str, thinking: bool, rounds: list[tuple[str, list[str]]]) -> None:
    tokenizer, template = tokenizer_of(name), template_of(name, thinking)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]
    ids, whole = template.prompt(messages), render(name, messages, thinking)
    assert ids == encode(whole, name)
    append_only = True
    for turn, results in rounds:
        turn = neutral(turn, tokenizer)
        assume(turn[0].isalnum() and "A stand-in" not in turn)
        generated = said(name, thinking, turn)
        results = [neutral(result, tokenizer) for result in results]
        turn_ids = [*encode(generated, name), tokenizer.eos_token_id]
        ids = ids + turn_ids + template.between(results, turn_ids)
        messages += [{"role": "assistant", "content": generated}]
        messages += [{"role": "tool", "content": result} for result in results]
        before, whole = whole, render(name, messages, thinking)
        append_only &= whole.startswith(before + generated)
    assert append_only == (thinking in KEPT[name] or not rounds)
    if append_only:
        assert ids == encode(whole, name)


@every_template
@both_ways
def test_the_templates_can_be_used(name: str, thinking: bool) -> None:
    template_of(name, thinking).check()


QWEN = "<|im_end|>\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LLAMA = '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"R"<|eot_id|>'


@pytest.mark.parametrize(
    ("name", "thinking", "text"),
    [
        ("qwen2.5", False, QWEN),
        ("qwen3", False, QWEN + "<think>\n\n</think>\n\n"),
        ("qwen3", True, QWEN),
        ("qwen3.5", True, QWEN + "<think>\n"),
        ("llama3.1", False, LLAMA + "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ],
)
def test_what_stands_between_two_turns(name: str, thinking: bool, text: str) -> None:
    template, end = template_of(name, thinking), tokenizer_of(name).eos_token_id
    assert template.between(["R"], [5, 6]) == encode(text, name)  # a turn that a stop string ended
    assert template.between(["R"], [5, end]) == encode(text, name)[1:]


def test_results_that_hold_the_stand_in_are_no_trouble() -> None:
    template = template_of("qwen2.5", False)
    results = ["A stand-in turn", "A stand-in question", "A stand-in result"]
    text = tokenizer_of("qwen2.5").decode(template.between(results, []))
    assert text.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\nA stand-in turn\n</tool_response>")


TOOL_BLIND = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
KNOWS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "expected a tokenizer with a chat template"),
        (TOOL_BLIND, "the chat template ignores tools"),
        (KNOWS + "{% for m in messages %}{{ m.what.content }}{% endfor %}", "cannot render it: UndefinedError"),
        (KNOWS + "{{ messages[-1].content }}", "leaves out what the assistant said"),
        (KNOWS + "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", "leaves out the result"),
        (
            KNOWS + "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
            "leaves out the result of a tool, or puts",
        ),
        (KNOWS + "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "differently later"),
    ],
)
def test_templates_that_are_refused(source: str | None, reason: str) -> None:
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    tokenizer.chat_template = source
    with pytest.raises(ValueError, match=reason):
        ToolTemplate(tokenizer, TOOLS, {}).check()
