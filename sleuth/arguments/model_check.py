"""Compares the model's shape in its config.json with the flags of `ModelArgs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sleuth.arguments.args import Args
from sleuth.arguments.checks import divisibility_problems, expert_problems, flag
from sleuth.arguments.files_check import read_config
from sleuth.arguments.hf_config import complete_config, rotary_base
from sleuth.arguments.parser import ArgumentsError
from sleuth.arguments.train_flags import ModelArgs

ArgsT = TypeVar("ArgsT", bound=Args)


class Tokenizer(Protocol):
    def get_vocab(self) -> dict[str, int]: ...


def model_flags(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `ModelArgs` that describe the model of a Hugging Face config.json.

    Raises ValueError for a model that the trainer does not know or cannot compute.
    """
    config = complete_config(hf_config)
    kind, heads = config["model_type"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    return {
        "swiglu": True,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups < heads,
        "num_query_groups": groups,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "qk_layernorm": kind in ("qwen3", "qwen3_moe"),
        "add_qkv_bias": kind == "qwen2",
        "disable_bias_linear": True,
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "use_rotary_position_embeddings": True,
        "rotary_base": rotary_base(config),
        "vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        **_expert_flags(config),
    }


def _expert_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a mixture of experts; all None for a dense model."""
    if config["model_type"] != "qwen3_moe":
        return dict.fromkeys(("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax"))
    return {
        "num_experts": config["num_local_experts"],  # num_experts, too, is read into this name
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_pre_softmax": not config["norm_topk_prob"],
    }


def check_model(args: ArgsT, hf_config: Mapping[str, Any]) -> ArgsT:
    """`args` with every model flag, and the limit of the context, filled in from the model's config.json.

    Raises ValueError if a flag contradicts config.json (it names the flag and both values), or if the parallel layout
    does not fit the model.
    """
    longest = complete_config(hf_config)["max_position_embeddings"]
    return fit_to_model(args, model_flags(hf_config), longest, f"the config.json of {args.hf_checkpoint}")


def fit_to_model(args: ArgsT, shape: Mapping[str, Any], longest: int | None, source: str) -> ArgsT:
    """As `check_model`, from a `shape` (values of `ModelArgs`), the longest context in tokens, and their `source`."""
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
    """A sentence for each model flag that contradicts the `shape`, whose `source` the sentence names."""
    return [
        f"{flag(name)}: the flag says {given}, {source} says {value}; drop the flag or "
        "use the scripts/models/ file of this model"
        for name, value in shape.items()
        if (given := getattr(flags, name)) is not None and given != value
    ]


def check_model_flags(flags: ModelArgs, folder: Path) -> None:
    """Raise ValueError if model flags contradict the config.json of a Hugging Face folder, or the folder has none."""
    problems = contradictions(flags, model_flags(read_config(folder)), f"the config.json of {folder}")
    if problems:
        raise ArgumentsError("the arguments do not fit the model\n  " + "\n  ".join(problems))


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if the tokenizer has ids for which the model has no embedding.

    Such an id would kill an engine's process.
    """
    word, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise ArgumentsError(
            f"the tokenizer does not fit the model: expected ids below the model's vocab_size {vocab_size}, found "
            f"{largest} ({word!r}); use the tokenizer this model was trained with, or enlarge the model's embedding"
        )
