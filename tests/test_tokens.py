"""What the length of a text tells of its tokens, without encoding it."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sleuth.tokens import characters_a_token, encode, has_more_tokens
from tests.scripted import make_plain_bpe_tokenizer
from tests.tiny_models import make_byte_bpe_tokenizer

TOKENIZERS = [
    AutoTokenizer.from_pretrained("data/demo/model"),
    make_byte_bpe_tokenizer(),
    make_plain_bpe_tokenizer(),
]
PIECES = st.sampled_from(
    ["the ", "    ", "\n", "ᾂ", unicodedata.normalize("NFD", "ᾂ"), "日本", "=", "😀", "<|im_end|>", "a"]
)


@given(st.lists(st.tuples(PIECES, st.integers(1, 40))), st.integers(0, 30), st.sampled_from(TOKENIZERS))
def test_what_is_said_to_be_too_long_is(pieces, tokens, tokenizer):
    text = "".join(piece * count for piece, count in pieces)
    if has_more_tokens(text, tokens, tokenizer):
        assert len(encode(text, tokenizer).ids) > tokens


def test_megabytes_are_told_at_once():
    tokenizer, text = TOKENIZERS[0], "what is this " * 4_000_000
    start = time.perf_counter()
    assert has_more_tokens(text, 4096, tokenizer)
    assert time.perf_counter() - start < 2  # encoding takes half a minute


def swallowing() -> PreTrainedTokenizerFast:
    """A token of it takes any number of spaces."""
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def fusing() -> PreTrainedTokenizerFast:
    """Any number of unknown letters becomes one token."""
    backend = Tokenizer(models.BPE(vocab={"?": 0, "a": 1}, merges=[], unk_token="?", fuse_unk=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("tokenizer", [swallowing(), fusing()], ids=["swallowing", "fusing"])
def test_nothing_is_said_where_a_token_has_no_bound(tokenizer):
    assert characters_a_token(tokenizer) is None
    assert not has_more_tokens("x" * 10**6, 10, tokenizer)
