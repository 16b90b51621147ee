"""Turns texts and messages into the token ids that a model sees: by its chat template, or unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from sleuth.data.messages import Message, Prompt

OWN_KEYWORDS = {
    *("tokenize", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length"),
    *("conversation", "tools", "add_generation_prompt", "continue_final_message"),
}
"""Arguments of the chat template's call that are the renderer's business, or would change what it returns."""


class PromptRenderer:
    """Turns a prompt into token ids, by the chat template, or (texts only) as the tokenizer encodes a text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        apply_chat_template: bool,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """ValueError if the tokenizer has no chat template, or `template_kwargs` holds one of OWN_KEYWORDS."""
        self._tokenizer = tokenizer
        self._apply_chat_template = apply_chat_template
        self._template_kwargs = template_kwargs or {}
        self._opening = opening_ids(tokenizer)
        if apply_chat_template and not tokenizer.chat_template:
            raise ValueError(
                "--apply-chat-template: the tokenizer has no chat template; use one that has, or drop the flag"
            )
        if taken := sorted(OWN_KEYWORDS & self._template_kwargs.keys()):
            raise ValueError(
                f"--apply-chat-template-kwargs: expected arguments of the template itself, found {', '.join(taken)}, "
                "which this program sets; leave them out"
            )

    def render(self, prompt: Prompt, tools: Sequence[Any] | None = None, where: str = "the prompt") -> list[int]:
        """Token ids of the prompt, up to the point where the model continues.

        With a chat template, a text counts as one user message, and if the last message is the assistant's, the model
        continues it. Without one, a text begins with what the tokenizer puts before texts (some put a BOS). `where`
        names row and column in the ValueError for a prompt that cannot be rendered or encoded.
        """
        if self._apply_chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            # The template has already put in all special tokens.
            return self._encode(self._fill_template(messages, tools, where), where)
        if not isinstance(prompt, str):
            raise ValueError(f"{where}: the prompt is a list of messages: add --apply-chat-template to render it")
        return with_opening(self._encode(prompt, where), self._opening)

    def _encode(self, text: str, where: str) -> list[int]:
        check_encodable(text, where)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _fill_template(self, messages: list[Message], tools: Sequence[Any] | None, where: str) -> str:
        if messages[-1]["role"] == "assistant":
            return self._continue_last(messages, tools, where)
        return self._call_template(messages, tools, where, add_generation_prompt=True)

    def _continue_last(self, messages: list[Message], tools: Sequence[Any] | None, where: str) -> str:
        """The rendered conversation up to the end of the assistant's last message.

        Before that message only the opening of a model's turn may stand: some templates put an empty reasoning block
        there.
        """
        content = messages[-1]["content"] or ""
        settings = {"continue_final_message": True, "add_generation_prompt": False}
        text = opened = ""
        if content:
            text = self._call_template(messages, tools, where, **settings)
            opened = self._call_template(messages[:-1], tools, where, add_generation_prompt=True)
        if not content or not text.endswith(content) or not opened.startswith(text[: -len(content)]):
            found = f"the chat template ends with {text[-120:]!r}" if content else "it has no text to continue"
            raise ValueError(
                f"{where}: the last message is the assistant's and would be continued (continue_final_message=True, "
                f"add_generation_prompt=False), but {found}; end with a message of the user, or give the prompt "
                "as a text without --apply-chat-template"
            )
        return text

    def _call_template(self, messages: list[Message], tools: Sequence[Any] | None, where: str, **settings: bool) -> str:
        options: dict[str, Any] = {**self._template_kwargs, **settings, "tools": tools or None}
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # a template is a program of the model's makers, and raises what it likes
            message = f"{type(error).__name__}: {error}"
            raise ValueError(f"{where}: the chat template cannot render it: {message:.500}") from error


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids that the tokenizer puts before every text, such as a BOS (not those that it puts after one)."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole: list[int] = tokenizer.encode("a")
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), [])


def with_opening(ids: list[int], opening: list[int]) -> list[int]:
    """`opening + ids`, or `ids` if they already begin with `opening`."""
    return ids if ids[: len(opening)] == opening else opening + ids


def check_encodable(text: str, where: str) -> None:
    """ValueError naming `where` if the text holds half of a surrogate pair, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"expected text that can be encoded in {where}, found the lone surrogate {text[error.start]!a} in "
            f"{text[max(0, error.start - 20) : error.end + 20]!a}; correct the row, or leave it out"
        ) from error
