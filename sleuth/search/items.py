"""Results of a search as a numbered list of whole items, within a number of tokens: what a tool message holds."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from sleuth.search.observation import CHARACTERS_A_TOKEN, Passage, neutral
from sleuth.tokens import characters_a_token, encode

NOTHING_FOUND = "Nothing was found."


def format_items(passages: Sequence[Passage], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> str:
    """`[1] Title` and its text for as many passages as go whole into `max_tokens` tokens.

    A first one that is too long for itself is cut, at a token. What could act (special tokens, tags) is neutralised.
    """
    kept: list[str] = []
    for number, (title, text) in enumerate(filter(any, passages), start=1):
        item = neutral(_bounded(f"[{number}] {title}\n{text}".strip(), tokenizer, max_tokens), tokenizer)
        if len(encode("\n\n".join([*kept, item]), tokenizer).ids) > max_tokens:
            return "\n\n".join(kept) or _cut(item, tokenizer, max_tokens)
        kept.append(item)
    return "\n\n".join(kept) or NOTHING_FOUND


def format_text(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> str:
    """As many paragraphs (lines) as go whole into `max_tokens` tokens; a first one that is too long is cut, at a token.

    What could act (special tokens, tags) is neutralised.
    """
    text = neutral(_bounded(text, tokenizer, max_tokens), tokenizer)
    if len(encode(text, tokenizer).ids) <= max_tokens:
        return text
    cut = _cut(text, tokenizer, max_tokens)
    return cut if text[len(cut) :].startswith("\n") else cut.rpartition("\n")[0] or cut


def _bounded(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> str:
    """A text so long that it holds `max_tokens` tokens, and not much longer: what follows need not be encoded."""
    bounded = text[: max_tokens * CHARACTERS_A_TOKEN]
    if len(bounded) < len(text) and len(encode(bounded, tokenizer).ids) <= max_tokens:
        most = characters_a_token(tokenizer)
        return text if most is None else text[: max_tokens * most]
    return bounded


def _cut(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> str:
    """The beginning of a text, at most `max_tokens` tokens long."""
    offsets = encode(text, tokenizer).offsets
    end = offsets[max_tokens - 1][1] if len(offsets) >= max_tokens else len(text)
    return text[:end].rstrip("\ufffd")
