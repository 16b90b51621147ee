"""Makes observations: the token ids that a model reads after a search."""

from __future__ import annotations

import re
import reprlib
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from sleuth.tokens import characters_a_token, encode

OBSERVATION_HEAD = "\n\n<information>"
OBSERVATION_TAIL = "</information>\n\n"
TAGS = ("think", "search", "information", "answer", "tool_call", "tool_response")
"""Whose tags act in one protocol or the other."""
LONGEST_WORD = 30
"""A passage is cut back to a space no further than this many characters; Chinese has none, for one."""
LONGEST_TITLE = 300
"""Characters; Wikipedia's titles have at most 255 bytes."""
CHARACTERS_A_TOKEN = 16
"""Hardly a text has more on average. What goes beyond `max_tokens` of them is cut off before anything is encoded."""


class Passage(NamedTuple):
    """A passage that was found; `title` may be empty."""

    title: str
    text: str


def to_passage(item: Any) -> Passage:
    """Title and text of a search result.

    It takes `{"document": {"contents": ...}}`, a document itself, `{"title", "text"}`, or the contents as a string.
    The first line of contents is the title, usually in quotes; a longer line than LONGEST_TITLE without quotes is text.
    Raises ValueError for anything else.
    """
    document = item.get("document", item) if isinstance(item, dict) else item
    if isinstance(document, Passage) and all(isinstance(part, str) for part in document):
        return document
    if isinstance(document, str):
        return _split_contents(document)
    if isinstance(document, dict):
        if isinstance(contents := document.get("contents"), str):
            return _split_contents(contents)
        if isinstance(text := document.get("text"), str):
            return Passage(title_text(document.get("title")), text.strip())
    raise ValueError(f"expected a passage with 'contents' or 'title' and 'text', found {reprlib.repr(item)}")


def title_text(title: Any) -> str:
    """A title on one line; "" if there is none (null, or NaN, as in tables)."""
    return " ".join(str(title).split()) if isinstance(title, str | int) else ""


def _split_contents(contents: str) -> Passage:
    first, newline, rest = contents.strip().partition("\n")
    title = first.strip()
    quoted = len(title) > 1 and title[0] == title[-1] == '"'
    if not quoted and (not newline or len(title) > LONGEST_TITLE):
        return Passage("", contents.strip())
    return Passage(title[1:-1].strip() if quoted else title, rest.strip())


def format_observation(passages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[int]:
    """The token ids of an observation: what the model reads after a search.

    The text is `\\n\\n<information>Doc 1(Title: ...) ...\\nDoc 2(Title: ...) ...</information>\\n\\n`, encoded
    on its own, at most `max_tokens` long. If it is too long, the longest passages are shortened first, to equal
    lengths and at a word; if that leaves too little for each, the last passages are dropped. The closing tag is always
    kept, even if `max_tokens` is less than the empty frame needs. Protocol tags and special tokens inside passages are
    changed so that they have no effect. A title has at most LONGEST_TITLE characters; passages with neither title nor
    text are left out. Items may be anything that `to_passage` takes.
    """
    found = [passage for passage in map(to_passage, passages) if any(passage)]
    longest = max_tokens * CHARACTERS_A_TOKEN
    ids, whole = _observation(_clipped(found, longest), tokenizer, max_tokens)
    if whole and any(len(text) > longest for _, text in found):  # long runs of one character: a token holds many
        most = characters_a_token(tokenizer)
        ids, _ = _observation(_clipped(found, None if most is None else most * max_tokens), tokenizer, max_tokens)
    return list(ids)


def _clipped(passages: Sequence[Passage], longest: int | None) -> tuple[Passage, ...]:
    return tuple(
        Passage(_clip(title, LONGEST_TITLE), text if longest is None else _clip(text, longest))
        for title, text in passages
    )


def _clip(text: str, characters: int) -> str:
    """The first characters of a text, up to the last whole word if the script has words."""
    characters = max(characters, 0)
    return text if len(text) <= characters else _cut_at_word(text, characters)


@lru_cache(maxsize=1024)
def _observation(
    passages: tuple[Passage, ...], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[tuple[int, ...], bool]:
    """The ids of an observation, and whether it is whole. Cached: samples of a group often find the same passages."""
    lines = [_line(number, passage, tokenizer) for number, passage in enumerate(passages, start=1)]
    encoding = encode(_frame(lines), tokenizer)
    if len(encoding.ids) <= max_tokens:
        return tuple(encoding.ids), True
    return _shortened_observation(lines, _token_starts(lines, encoding), tokenizer, max_tokens), False


def _shortened_observation(
    lines: list[str], token_starts: list[list[int]], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[int, ...]:
    empty = _empty_observation(tokenizer)
    for count in range(len(lines), 0, -1):
        budget = max_tokens - len(empty) - count  # a line end costs a token
        while budget > 0:
            shares = _fair_shares([len(starts) for starts in token_starts[:count]], budget)
            cuts = [_cut(*parts) for parts in zip(lines[:count], token_starts[:count], shares, strict=True)]
            if not all(_holds_text(cut, line) for cut, line in zip(cuts, lines[:count], strict=True)):
                break  # too little for so many passages
            ids = encode(_frame(cuts), tokenizer).ids
            if len(ids) <= max_tokens:
                return tuple(ids)
            budget -= len(ids) - max_tokens  # a cut can cost a token where the whole text had merged
    return empty


@lru_cache(maxsize=8)
def _empty_observation(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return tuple(encode(_frame([]), tokenizer).ids)


def _token_starts(lines: Sequence[str], encoding: Encoding) -> list[list[int]]:
    """For each line the positions, in characters from its beginning, at which its tokens start."""
    starts = [start for start, _ in encoding.offsets]
    found, line_start = [], len(OBSERVATION_HEAD)
    for line in lines:
        line_end = line_start + len(line)
        span = starts[bisect_left(starts, line_start) : bisect_left(starts, line_end)]
        found.append([start - line_start for start in span])
        line_start = line_end + 1
    return found


def _line(number: int, passage: Passage, tokenizer: PreTrainedTokenizerBase) -> str:
    return neutral(f"Doc {number}(Title: {passage.title}) {passage.text}".rstrip(), tokenizer)


def _frame(lines: Sequence[str]) -> str:
    return OBSERVATION_HEAD + "\n".join(lines) + OBSERVATION_TAIL


def _fair_shares(lengths: Sequence[int], budget: int) -> list[int]:
    """How many tokens each passage may have: short ones all of theirs, the long ones equal shares of the rest."""
    shares = [0] * len(lengths)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for rank, index in enumerate(order):
        shares[index] = min(lengths[index], budget // (len(order) - rank))
        budget -= shares[index]
    return shares


def _cut(line: str, token_starts: Sequence[int], tokens: int) -> str:
    """The first `tokens` tokens of a line, up to the last whole word if the script has words."""
    if tokens >= len(token_starts):
        return line
    return _cut_at_word(line, token_starts[tokens])  # not within a character whose bytes are several tokens


def _cut_at_word(line: str, end: int) -> str:
    cut = line[:end]
    space = cut.rfind(" ")
    if not line[end].isspace() and space >= end - LONGEST_WORD:
        cut = cut[: max(space, 0)]
    return cut.rstrip()


def _holds_text(cut: str, line: str) -> bool:
    """Whether a shortened line still has text after `Doc 1(Title: ...)`, or never had any."""
    return cut == line or ") " in cut


def neutral(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text with a space after the first character of all tags and special tokens: `<answer>` -> `< answer>`."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be encoded
    return _acting_text(tokenizer).sub(lambda match: match[0][0] + " " + match[0][1:], text)


@lru_cache(maxsize=8)
def _acting_text(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    tags = [f"<{slash}{name}>" for name in TAGS for slash in ("", "/")]
    markup = [token for token in tokenizer.get_added_vocab() if token.startswith(("<", "["))]
    special = [token for token in tokenizer.all_special_tokens if len(token.strip()) > 1]
    return re.compile("|".join(map(re.escape, sorted({*tags, *markup, *special}, key=len, reverse=True))))
