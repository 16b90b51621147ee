"""Tiny random models with a real tokenizer: what the tests train, serve and convert.

path = make_tiny_model(tmp_path / "model", kind="qwen3", seed=1)
make_byte_bpe_tokenizer().save_pretrained(folder)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Kind = Literal["qwen2", "qwen3", "qwen3_moe", "llama"]
CLASSES: dict[Kind, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# How Qwen2's tokenizer cuts text before it merges bytes; punctuation takes the line ends that follow it along.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "<think> I need to find out. </think> <search> who wrote hamlet </search>",
    "<information> William Shakespeare wrote Hamlet. </information>",
    "<answer> William Shakespeare </answer>",
    "the quick brown fox jumps over the lazy dog",
    "</search>\n\n</answer>\n\n hello world",
]


def make_byte_bpe_tokenizer(vocab_size: int = 480) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens that encodes any text.

    Its special tokens are Qwen's: `<|endoftext|>` (0, padding), `<|im_start|>` (1) and `<|im_end|>` (2, end of
    sequence). Closing tags merge with what follows them (`>\\n\\n` is one token), as in Qwen's vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 50, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(folder: Path | str, kind: Kind = "qwen2", *, seed: int = 0, **config: Any) -> Path:
    """Save a random float32 model and its tokenizer in `folder`, and return it.

    By default: vocabulary of 512 (more than the tokenizer has, as in real models), width 64, 2 layers, 4 heads in 2
    groups, 2,048 positions, 4 experts in a mixture, weights wide enough (0.2) that log-probabilities differ clearly.
    `config` overrides any field of the Hugging Face configuration.
    """
    tokenizer = make_byte_bpe_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind.startswith("qwen3"):
        fields["head_dim"] = 32
    if kind == "qwen3_moe":
        fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    fields.update(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config_class, model_class = CLASSES[kind]
        model = model_class(config_class(**fields))
        if kind == "qwen2":  # the biases of q, k and v start at zero: give them values, so that a lost one shows
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
