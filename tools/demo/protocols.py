"""How a trajectory of the warm-start models is written: with the tags of generate_with_search.py, or with tool calls.

A protocol gives the text of each part. Every part is encoded on its own, as in a rollout, and what the environment puts
in comes from the code that puts it in there.
"""

from __future__ import annotations

import json
import random
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from generate_with_tools import TOOLS
from sleuth.chat_template import ToolTemplate
from sleuth.hooks import decode
from sleuth.search.items import format_items
from sleuth.search.observation import Passage, format_observation
from sleuth.tokens import encode
from tools.demo.make_data import INSTRUCTION

OBSERVATION_TOKENS = 48
"""What run_demo.sh sets as max_observation_tokens, and as max_tool_tokens."""

THINK_FIRST = ["I need to search.", "Let me look it up.", "I should search for this.", "I do not know this yet."]
THINK_RECALL = ["I know this one.", "I remember this.", "I can say it at once.", "That is well known."]
THINK_NEXT = ["Now I need that person.", "That is the name. Next search.", "One more search.", "I look up the name."]
THINK_LAST = ["Now I know.", "The passage says it.", "That is the answer.", "I can answer now."]


class Form(Protocol):
    """A protocol's texts. `before` counts the observations so far."""

    def prompt(self, question: str) -> str: ...
    def search(self, query: str, before: int, rng: random.Random) -> str: ...
    def observation(self, passage: Passage) -> str: ...
    def answer(self, answer: str, before: int, rng: random.Random) -> str: ...


class Tags:
    """`<think>`, `<search>`, `<information>` and `<answer>`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def prompt(self, question: str) -> str:
        messages = [{"role": "user", "content": INSTRUCTION + question}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def search(self, query: str, before: int, rng: random.Random) -> str:
        return f"<think>{rng.choice(THINK_NEXT if before else THINK_FIRST)}</think>\n<search> {query} </search>"

    def observation(self, passage: Passage) -> str:
        return decode(format_observation([passage], self._tokenizer, OBSERVATION_TOKENS), self._tokenizer)

    def answer(self, answer: str, before: int, rng: random.Random) -> str:
        think = rng.choice(THINK_LAST if before else THINK_RECALL)
        return f"<think>{think}</think>\n<answer> {answer} </answer>{self._tokenizer.eos_token}"


class ToolCalls:
    """`<tool_call>` with JSON, results as messages of the role tool, and a line `Answer: ...`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._template = ToolTemplate(tokenizer, TOOLS, {"enable_thinking": False})

    def prompt(self, question: str) -> str:
        return decode(self._template.prompt([{"role": "user", "content": question}]), self._tokenizer)

    def search(self, query: str, before: int, rng: random.Random) -> str:
        call = json.dumps({"name": "search", "arguments": {"query": query}}, ensure_ascii=False)
        return f"<tool_call>{call}</tool_call>{self._tokenizer.eos_token}"

    def observation(self, passage: Passage) -> str:
        result = format_items([passage], self._tokenizer, OBSERVATION_TOKENS)
        turn_end = encode(str(self._tokenizer.eos_token), self._tokenizer).ids
        return decode(self._template.between([result], turn_end), self._tokenizer)

    def answer(self, answer: str, before: int, rng: random.Random) -> str:
        return f"Answer: {answer}{self._tokenizer.eos_token}"


FORMS = {"tags": Tags, "tools": ToolCalls}
