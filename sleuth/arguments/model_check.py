"""The model's shape: what its config.json says, against the flags of `ModelArgs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sleuth.arguments.args import Args
from sleuth.arguments.checks import divisibility_problems, expert_problems, flag
from sleuth.arguments.files_check import read_config
from sleuth.arguments.parser import ArgumentsError
from sleuth.arguments.train_flags import ModelArgs

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")

ArgsT = TypeVar("ArgsT", bound=Args)


class Tokenizer(Protocol):
    def get_vocab(self) -> dict[str, int]: ...


def model_flags(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `ModelArgs` that a Hugging Face config.json stands for.

    Raises ValueError for an architecture that the trainer does not know.
    """
    kind = hf_config.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise ArgumentsError(
            f"--hf-checkpoint: expected a model of type {' or '.join(SUPPORTED_MODEL_TYPES)}, found {kind!r} in its "
            "config.json; choose another model"
        )
    if hf_config.get("hidden_act", "silu") != "silu":
        raise ArgumentsError(f"--hf-checkpoint: expected hidden_act silu, found {hf_config['hidden_act']!r}")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if hf_config.get(name):
            raise ArgumentsError(f"--hf-checkpoint: expected {name} false in config.json, found true: not supported")
    heads = hf_config["num_attention_heads"]
    groups = hf_config.get("num_key_value_heads") or heads
    return {
        "swiglu": True,
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "ffn_hidden_size": hf_config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups < heads,
        "num_query_groups": groups,
        "kv_channels": hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        "qk_layernorm": kind in ("qwen3", "qwen3_moe"),
        "add_qkv_bias": kind == "qwen2",
        "disable_bias_linear": True,
        "normalization": "RMSNorm",
        "norm_epsilon": hf_config["rms_norm_eps"],
        "use_rotary_position_embeddings": True,
        "rotary_base": _rotary_base(hf_config),
        "vocab_size": hf_config["vocab_size"],
        "untie_embeddings_and_output_weights": not hf_config.get("tie_word_embeddings", False),
        **_expert_flags(hf_config),
    }


def _expert_flags(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a mixture of experts, None in a dense model."""
    if hf_config["model_type"] != "qwen3_moe":
        return dict.fromkeys(("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax"))
    if hf_config.get("mlp_only_layers") or hf_config.get("decoder_sparse_step", 1) != 1:
        raise ArgumentsError(
            "--hf-checkpoint: expected experts in every layer, found layers without (mlp_only_layers or "
            "decoder_sparse_step in config.json): not supported"
        )
    # Transformers 5 writes num_local_experts, older versions num_experts.
    experts = hf_config.get("num_local_experts") or hf_config.get("num_experts")
    if experts is None:
        raise ArgumentsError("--hf-checkpoint: expected num_local_experts or num_experts in config.json, found neither")
    return {
        "num_experts": experts,
        "moe_router_topk": hf_config["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf_config["moe_intermediate_size"],
        "moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False),
    }


def _rotary_base(hf_config: Mapping[str, Any]) -> float:
    """`rope_theta`, which newer configs keep under `rope_parameters`. Scaled variants are refused."""
    parameters = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ArgumentsError(
            f"--hf-checkpoint: expected plain rotary embeddings, found rope type {kind!r} in config.json"
        )
    return float(parameters.get("rope_theta") or hf_config.get("rope_theta") or 10000.0)


def check_model(args: ArgsT, hf_config: Mapping[str, Any]) -> ArgsT:
    """`args` with every model flag, and the context's limit, filled in from the model's config.json.

    Raises ValueError naming flag and both values where they contradict, or where the parallel layout
    does not fit the model.
    """
    source = f"the config.json of {args.hf_checkpoint}"
    return fit_to_model(args, model_flags(hf_config), hf_config.get("max_position_embeddings"), source)


def fit_to_model(args: ArgsT, shape: Mapping[str, Any], longest: int | None, source: str) -> ArgsT:
    """`check_model` with the values of `ModelArgs`, the context in tokens, and what says so."""
    problems = contradictions(args, shape, source)
    problems += divisibility_problems(
        args,
        heads=shape["num_attention_heads"],
        groups=shape["num_query_groups"],
        layers=shape["num_layers"],
        widths={name: shape[name] for name in ("hidden_size", "ffn_hidden_size", "vocab_size")},
    )
    problems += expert_problems(args, shape["num_experts"], shape["moe_ffn_hidden_size"])
    context = args.rollout_max_context_len
    if longest and context and context > longest:
        problems.append(f"--rollout-max-context-len: expected at most the model's {longest} tokens, found {context}")
    if problems:
        raise ArgumentsError("the arguments do not fit the model\n  " + "\n  ".join(problems))
    return args.model_copy(update={**shape, "rollout_max_context_len": context or longest})


def contradictions(flags: ModelArgs, shape: Mapping[str, Any], source: str) -> list[str]:
    """A sentence for each model flag that says something else than `source`, which states the `shape`."""
    return [
        f"{flag(name)}: the flag says {given}, {source} says {value}; drop the flag or "
        "use the scripts/models/ file of this model"
        for name, value in shape.items()
        if (given := getattr(flags, name)) is not None and given != value
    ]


def check_model_flags(flags: ModelArgs, folder: Path) -> None:
    """Raise ValueError if model flags contradict the config.json of a Hugging Face folder, or it has none."""
    problems = contradictions(flags, model_flags(read_config(folder)), f"the config.json of {folder}")
    if problems:
        raise ArgumentsError("the arguments do not fit the model\n  " + "\n  ".join(problems))


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer has ids that the model has no embedding for.

    Such an id ends an engine's process.
    """
    word, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise ArgumentsError(
            f"the tokenizer does not fit the model: expected ids below the model's vocab_size {vocab_size}, found "
            f"{largest} ({word!r}); use the tokenizer this model was trained with, or enlarge the model's embedding"
        )
