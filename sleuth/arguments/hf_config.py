"""Reads a model's config.json as transformers does, defaults filled in.

The engines read it by transformers, so the trainer does, too. Models that the trainer cannot compute are refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sleuth.arguments.parser import ArgumentsError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 and later stretch rotary frequencies; the fields have the names of config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def complete_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as transformers understands it: old names translated, sections merged, defaults filled in.

    Raises ValueError for an architecture that the trainer does not know, or a feature that it does not compute.
    """
    kind = hf_config.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise ArgumentsError(
            f"--hf-checkpoint: expected a model of type {' or '.join(SUPPORTED_MODEL_TYPES)}, found {kind!r} in its "
            "config.json; choose another model"
        )
    config = _as_transformers_reads(hf_config)
    problems = list(_not_computed(config))
    if problems:
        raise ArgumentsError(
            "--hf-checkpoint: the trainer does not compute what config.json asks for\n  "
            + "\n  ".join(problems)
            + "\nchoose another model, or correct config.json where the model was trained without it"
        )
    return config


def rotary_base(config: Mapping[str, Any]) -> float:
    """The base of the rotary embeddings of a complete config."""
    return float(config["rope_parameters"]["rope_theta"])


def rotary_scaling(config: Mapping[str, Any]) -> Llama3Scaling | None:
    """How the rotary frequencies of a complete config are stretched; None where they are not."""
    rope = config["rope_parameters"]
    if rope["rope_type"] == "default":
        return None
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _as_transformers_reads(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    # This import takes seconds; --help and errors in flags need not wait for it.
    from transformers import AutoConfig

    fields = {name: value for name, value in hf_config.items() if name not in ("model_type", "transformers_version")}
    try:
        return dict(AutoConfig.for_model(hf_config["model_type"], **fields).to_dict())
    except Exception as error:  # transformers raises errors of many kinds for values that it cannot use
        reason = " ".join(str(error).split())
        raise ArgumentsError(f"--hf-checkpoint: transformers cannot read its config.json: {reason}") from error


def _not_computed(config: Mapping[str, Any]) -> Iterator[str]:
    """Each feature that differs from the layers that the trainer builds, with the value found."""
    if config["hidden_act"] not in ("silu", "swish"):
        yield f"hidden_act: expected silu, found {config['hidden_act']!r}"
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(name):
            yield f"{name}: expected false, found true"
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other and not config.get("use_sliding_window"):
        yield f"layer_types: expected full_attention in every layer, found {', '.join(other)}"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        yield (
            "mlp_only_layers, decoder_sparse_step: expected experts in every layer, found layers without: "
            f"{config.get('mlp_only_layers')}, {config.get('decoder_sparse_step')}"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        yield f"quantization_config: expected plain weights, found the method {method!r}"
    yield from _rope_not_computed(config.get("rope_parameters") or {})


def _rope_not_computed(rope: Mapping[str, Any]) -> Iterator[str]:
    kind = rope.get("rope_type")
    if kind not in ("default", "llama3"):
        yield f"rope_parameters: expected rope type 'default' or 'llama3', found rope type {kind!r}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor: expected 1.0, found {rope['partial_rotary_factor']}"
