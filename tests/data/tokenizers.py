"""Tokenizers that put something around a text, as many models' do."""

from __future__ import annotations

from copy import deepcopy

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def with_bos(tokenizer: PreTrainedTokenizerFast, *, eos: bool = False) -> PreTrainedTokenizerFast:
    """A copy that puts `<|endoftext|>` (0) before every text, and `<|im_end|>` (2) after it if `eos`."""
    backend = deepcopy(tokenizer.backend_tokenizer)
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A" + (" <|im_end|>" if eos else ""),
        special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)],
    )
    copy = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|endoftext|>")
    copy.chat_template = tokenizer.chat_template
    return copy
