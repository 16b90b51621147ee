"""The text of each token of a trajectory, so that tokens can be coloured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

LONGEST = 16
"""Tokens that are shown as one where their bytes make a character only together (an emoji, for example)."""
BROKEN = "\ufffd"


def load_tokenizer(configuration: dict[str, Any], run_dir: Path) -> Tokenizer | None:
    """The tokenizer of the run's model, from this machine's disk; None if it is not there."""
    name = configuration.get("hf_checkpoint")
    if not isinstance(name, str):
        return None
    places = [Path(name), run_dir / name, *(parent / name for parent in run_dir.resolve().parents)]
    found = next((place / "tokenizer.json" for place in places if (place / "tokenizer.json").is_file()), None)
    try:
        return Tokenizer.from_file(str(found or _in_hub_cache(name)))
    except Exception as error:  # the library raises bare exceptions
        logger.info("the tokenizer of %s could not be loaded (%s): tokens are not shown one by one", name, error)
        return None


def _in_hub_cache(name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "tokenizer.json")
    return found if isinstance(found, str) else None


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """The ids as pieces (number of tokens, text): one token each, but those that make a character only together.

    A token is decoded after the piece before it, since some tokenizers drop the space of a first token.
    """
    pieces: list[tuple[int, str]] = []
    previous: Sequence[int] = []
    before, start = "", 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode([*previous, *ids[start:end]], skip_special_tokens=False)
        piece = text[len(before) :] if text.startswith(before) else tokenizer.decode(ids[start:end], False)
        if piece.endswith(BROKEN) and end - start < LONGEST and end < len(ids):
            continue  # the rest of the character is in the next token
        pieces.append((end - start, piece))
        previous, start = ids[start:end], end
        before = tokenizer.decode(previous, skip_special_tokens=False)
    return pieces
