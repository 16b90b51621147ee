"""config.json values of the models that scripts/models/ has a file for, to plan a run before the model is there."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False}


def _qwen2(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, *, context: int, tied: bool = True, vocab: int = 151936
) -> dict[str, Any]:
    return {
        **_COMMON,
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
    }


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, *, tied: bool = True) -> dict[str, Any]:
    shape = _qwen2(layers, hidden, ffn, heads, 8, context=40960, tied=tied)
    return {**shape, "model_type": "qwen3", "head_dim": 128}


def _qwen3_moe(layers: int, hidden: int, ffn: int, heads: int, *, experts: int, expert_ffn: int) -> dict[str, Any]:
    return {
        **_qwen3(layers, hidden, ffn, heads, tied=False),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_ffn,
        "norm_topk_prob": True,
    }


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5B": _qwen2(24, 896, 4864, 14, 2, context=32768),
    "qwen2.5-1.5B": _qwen2(28, 1536, 8960, 12, 2, context=131072),
    "qwen2.5-3B": _qwen2(36, 2048, 11008, 16, 2, context=32768),
    "qwen2.5-7B": _qwen2(28, 3584, 18944, 28, 4, context=131072, tied=False, vocab=152064),
    "qwen3-0.6B": _qwen3(28, 1024, 3072, 16),
    "qwen3-1.7B": _qwen3(28, 2048, 6144, 16),
    "qwen3-4B": _qwen3(36, 2560, 9728, 32),
    "qwen3-8B": _qwen3(36, 4096, 12288, 32, tied=False),
    "qwen3-30B-A3B": _qwen3_moe(48, 2048, 6144, 32, experts=128, expert_ffn=768),
}
"""The published values of the base models; the variants of a size share everything but the context."""


def known_model(checkpoint: str) -> dict[str, Any] | None:
    """The values of the model that a checkpoint's folder is named after, such as models/Qwen2.5-3B-Instruct."""
    name = PurePath(checkpoint).name.lower()
    matches = [known for known in KNOWN_MODELS if name == known.lower() or name.startswith(f"{known.lower()}-")]
    return KNOWN_MODELS[matches[0]] if matches else None
