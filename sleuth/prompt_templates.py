"""Instructions for rows that hold a bare question: `--prompt-template`, a name of TEMPLATES or a file.

A template is a text with `{question}` in it, or, in a file that ends in .json, a list of messages whose texts hold it.
Nothing here knows tokenizers: what comes out is rendered as any other prompt.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUESTION = "{question}"
TAGS_INSTRUCTION = (
    "Answer the question at the end. First think, between <think> and </think>, and think again after each piece of "
    "new information. Whenever you lack knowledge, ask the search engine: write a query between <search> and "
    "</search>, and what it finds is given to you between <information> and </information>. You may search as often "
    "as you need. Once you know the answer, write it between <answer> and </answer>, in a few words and without an "
    "explanation, for example <answer> Lake Victoria </answer>."
)
TOOLS_INSTRUCTION = (
    "Answer the question. Whenever you lack knowledge, call the tool search with a short query; you may search several "
    "times. Once you know the answer, call nothing and end with a line that holds it in a few words:\nAnswer: ..."
)
TEMPLATES: dict[str, Any] = {
    "tags": f"{TAGS_INSTRUCTION} Question: {QUESTION}",
    "tools": [{"role": "system", "content": TOOLS_INSTRUCTION}, {"role": "user", "content": QUESTION}],
}
"""The protocols of generate_with_search.py (tags) and generate_with_tools.py (tools, whose hook says it by itself)."""

SHORT = 20
"""Characters that all prompts have in common, at their beginnings and ends, below which they hold no instruction."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A text, or messages, that a question is put into."""

    template: str | list[dict[str, Any]]

    @classmethod
    def load(cls, name: str) -> PromptTemplate:
        """The template of that name, or in that file; ValueError if there is none, or no place for a question."""
        if name in TEMPLATES:
            return cls(TEMPLATES[name])
        path = Path(name)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(
                f"--prompt-template: expected {' or '.join(TEMPLATES)}, or a text file, found {name} ({reason}); "
                "correct the name"
            ) from None
        template = cls(_messages(text, name) if path.suffix == ".json" else text.removesuffix("\n"))
        if QUESTION not in json.dumps(template.template):
            raise ValueError(
                f"--prompt-template: expected the place of the question, {QUESTION}, in {name}, found none; write it"
            )
        return template

    def fill(self, question: str) -> str | list[dict[str, Any]]:
        """The prompt of a question."""
        if isinstance(self.template, str):
            return self.template.replace(QUESTION, question)
        return [{**message, "content": message["content"].replace(QUESTION, question)} for message in self.template]


def _messages(text: str, name: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--prompt-template: expected JSON in {name}, found something else: {error}") from None
    texts = isinstance(found, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in found
    )
    if not texts or not found:
        raise ValueError(f"--prompt-template: expected a list of messages with role and content in {name}")
    return list(found)


def lack_instruction(prompts: Sequence[str | list[dict[str, Any]]]) -> bool:
    """Whether these prompts are bare questions: an instruction would be the same in all of them.

    One prompt alone, and conversations of several messages, tell nothing.
    """
    texts = set()
    for prompt in prompts:
        if not isinstance(prompt, str):
            if len(prompt) > 1:
                return False
            prompt = str(prompt[0].get("content") or "")
        texts.add(prompt.strip())
    if len(texts) < 2:
        return False
    return _common_length(texts) + _common_length({text[::-1] for text in texts}) < SHORT


def _common_length(texts: Collection[str]) -> int:
    """How many characters at their beginning all texts have in common: as many as the first and the last by order."""
    first, last = min(texts), max(texts)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
