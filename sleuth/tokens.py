"""Encodes and decodes text, without adding special tokens and without the tokenizer's own threads."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> Encoding:
    """Token ids and offsets of a text, without added special tokens. A lone surrogate becomes a question mark."""
    try:
        return _encode(text, tokenizer)
    except TypeError:  # what UTF-8 cannot hold
        return _encode(text.encode("utf-8", "replace").decode("utf-8"), tokenizer)


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> Encoding:
    backend = tokenizer.backend_tokenizer
    if backend.truncation is None and backend.padding is None:
        return backend.encode(text, add_special_tokens=False)  # without the tokenizer's pool of threads
    encodings = tokenizer(text, add_special_tokens=False).encodings
    assert encodings is not None  # a tokenizer with a backend gives them
    return encodings[0]


def decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of token ids as they are, special tokens included."""
    return tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)


def has_more_tokens(text: str, tokens: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the text certainly has more than `tokens` tokens, told by its length alone, without encoding it."""
    if len(text) <= tokens:
        return False
    longest = characters_a_token(tokenizer)
    if longest is None or len(text) <= tokens * longest:
        return False
    return len(text) > tokens * longest * _COMPOSED or unicodedata.is_normalized("NFC", text)


_COMPOSED = 4
"""The most characters that become one when a text is normalized to NFC."""


@lru_cache(maxsize=8)
def characters_a_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """How many characters of a text in NFC one token stands for at most; None where a token has no such bound.

    It has one if each token stands for bytes of its own, as in the vocabularies of Qwen and Llama 3, and none swallows
    the space around it.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizer = (parts["normalizer"] or {"type": "NFC"})["type"]
    swallows = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    if '"ByteLevel"' not in json.dumps(parts["pre_tokenizer"]) or normalizer != "NFC" or swallows:
        return None
    return max(map(len, tokenizer.get_vocab()))  # written with a letter for each byte, and a character has at least one


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder. ValueError, which names the folder, if it cannot be loaded."""
    from transformers import AutoTokenizer  # slow to import

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of several libraries, some of them bare
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"--hf-checkpoint: expected a tokenizer in {folder} that can be loaded, found: {reason}; download its "
            "files (tokenizer.json, tokenizer_config.json, config.json) again"
        ) from None
