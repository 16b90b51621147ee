"""Encodes and decodes text, without adding special tokens and without the tokenizer's own threads."""

from __future__ import annotations

from collections.abc import Sequence
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
