"""Real chat templates on a small tokenizer that knows their special tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tests.tiny_models import make_byte_bpe_tokenizer

FOLDER = Path(__file__).parent / "cases/chat_templates"
SPECIAL = {
    "llama3.1": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
}
NAMES = ("qwen2.5", "qwen3", "qwen3.5", "llama3.1")


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template of a model; its end of sequence is the token that ends a turn there."""
    tokenizer = make_byte_bpe_tokenizer()
    if name in SPECIAL:
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[name]})
        tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text("utf-8")
    return tokenizer
