"""The tool calls' warm-start model: its chat template, its trajectories, and the shipped folder."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from generate_with_tools import ANSWER_LINE, TOOLS
from sleuth.chat_template import ToolTemplate
from sleuth.tokens import encode
from sleuth.tool_calls import parse_tool_calls
from tools.demo.make_tool_model import CHAT_TEMPLATE
from tools.demo.make_trajectories import Sources, Writer
from tools.demo.protocols import OBSERVATION_TOKENS, ToolCalls

DATA = Path(__file__).parents[3] / "data" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DATA / "model_tools")


def test_the_shipped_chat_template_is_that_of_the_script_and_holds_tool_calls(tokenizer):
    assert (DATA / "model_tools/chat_template.jinja").read_text() == CHAT_TEMPLATE
    ToolTemplate(tokenizer, TOOLS, {}).check()
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "Paris"}}}
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False) == (
        "<|im_start|>system\nTools: search(query)<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>{"name": "search", "arguments": {"query": "Paris"}}</tool_call><|im_end|>\n'
    )


def test_trajectories_are_conversations_of_the_hook(tokenizer):
    writer = Writer(Sources.read(DATA), ToolCalls(tokenizer), seed=5, manner="recall")
    searched = 0
    for _ in range(200):
        prompt, *rest = (segment["text"] for segment in writer.next())
        assert prompt.startswith("<|im_start|>system\nTools: search(query)<|im_end|>\n<|im_start|>user\n")
        *turns, answer = rest[::2]
        for turn, observation in zip(turns, rest[1::2], strict=True):
            (call,) = parse_tool_calls(turn.removesuffix("<|im_end|>"))
            assert call.name == "search"
            assert observation.startswith(f"\n<|im_start|>tool\n[1] {call.arguments['query']}")
            result = observation.removeprefix("\n<|im_start|>tool\n").partition("<|im_end|>")[0]
            assert len(encode(result, tokenizer).ids) <= OBSERVATION_TOKENS
            searched += 1
        assert parse_tool_calls(answer) == []
        assert ANSWER_LINE.search(answer.removesuffix("<|im_end|>"))
    assert 40 < searched < 120
