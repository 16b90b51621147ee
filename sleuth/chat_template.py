"""What a chat template puts around turns: the prompt with its tools, and what stands between two turns of the model.

    template = ToolTemplate(tokenizer, tools, {"enable_thinking": False})
    prompt_ids = template.prompt([{"role": "user", "content": "Where is Paris?"}])
    ids = template.between(["a tool's result"], turn.ids)       # after the model's turn, up to its next one

A conversation is never rendered again. What comes after a turn (the end of the assistant's message, the tool messages,
the beginning of the next one) is taken from a rendering with a stand-in for the conversation so far. So templates that
would write an old turn differently, without its thoughts for one, do no harm: what the model has seen stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from sleuth.data.messages import Message
from sleuth.data.render import PromptRenderer
from sleuth.tokens import encode

QUESTION, TURN, RESULT = "A stand-in question", "A stand-in turn", "A stand-in result"


class ToolTemplate:
    """The tokenizer's chat template with tools, and arguments of the template's own. ValueError if it has none."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message], template_kwargs: Mapping[str, Any]
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("expected a tokenizer with a chat template, which tool calls need, found none")
        self._tokenizer, self._tools, self._kwargs = tokenizer, list(tools), dict(template_kwargs)
        self._renderer = PromptRenderer(tokenizer, True, self._kwargs)

    def prompt(self, messages: list[Message], where: str = "the prompt") -> list[int]:
        """Ids of the messages with the tools, up to where the model begins. ValueError for what cannot be rendered."""
        return self._renderer.render(messages, self._tools, where)

    def between(self, results: Sequence[str], turn_ids: Sequence[int], names: Sequence[str] | None = None) -> list[int]:
        """Ids from the end of a turn to the beginning of the next one, with the tools' results in between.

        `names`: of each result's tool [search]. The token that ends a turn is left out where the model generated it.
        """
        ids = encode(self._after_turn(results, names=names), self._tokenizer).ids
        return ids[1:] if turn_ids and ids and turn_ids[-1] == ids[0] else ids

    def _after_turn(
        self, results: Sequence[str], before: Sequence[Message] = (), names: Sequence[str] | None = None
    ) -> str:
        named = zip(names or ["search"] * len(results), results, strict=True)
        tools = [{"role": "tool", "name": name, "content": result} for name, result in named]
        text = self._render([*_opening(), *before, {"role": "assistant", "content": TURN}, *tools])
        at = text.rfind(TURN) if before else text.find(TURN)  # results may hold it
        if at < 0:
            raise ValueError("the chat template leaves out what the assistant said before a tool's result")
        return text[at + len(TURN) :]

    def _render(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        given = self._tools if tools is None else tools
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(given) or None,
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._kwargs,
                )
            )
        except Exception as error:  # a template is a program of the model's makers, and raises what it likes
            raise ValueError(f"the chat template cannot render it: {type(error).__name__}: {error}"[:500]) from error

    def check(self) -> None:
        """ValueError, with the reason, for a template through which tool calls cannot be held token for token."""
        if self._render(_opening()) == self._render(_opening(), tools=()):
            raise ValueError(
                "the chat template ignores tools, so the model would not know of the search; use a model whose "
                "template has them, or the hook generate_with_search with its tags"
            )
        first = self._after_turn([RESULT])
        if RESULT not in first:
            raise ValueError("the chat template leaves out the result of a tool, or puts it before the turn that asked")
        round_before = [{"role": "assistant", "content": "Before."}, {"role": "tool", "content": "Before that."}]
        if self._after_turn([RESULT], round_before) != first:
            raise ValueError(
                "the chat template writes a tool's result differently later in a conversation, so that what is "
                "between two turns cannot be appended; use another template"
            )


def _opening() -> list[Message]:
    return [{"role": "user", "content": QUESTION}]
