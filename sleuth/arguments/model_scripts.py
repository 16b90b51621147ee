"""Reads the shapes of models from scripts/models/*.sh, so that a run can be planned before its model is downloaded.

Only these scripts state the shapes. They are parsed as text; no shell runs.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from sleuth.arguments.parser import ArgumentsError, parse_args
from sleuth.arguments.train_flags import ModelArgs

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "models"

_MODEL_ARGS = re.compile(r"^MODEL_ARGS=\((?P<words>.*?)^\)", re.DOTALL | re.MULTILINE)
_CONTEXT = re.compile(r"^MAX_POSITION_EMBEDDINGS=(?P<tokens>\d+)", re.MULTILINE)
_NEEDED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
_SWITCHES = ("group_query_attention", "qk_layernorm", "add_qkv_bias", "untie_embeddings_and_output_weights")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """What a script says: the values of all `ModelArgs` and, if given, the base model's longest context in tokens.

    Variants of a model, such as -Instruct, share everything except the context.
    """

    script: str
    shape: dict[str, Any]
    context: int | None


def known_models() -> list[str]:
    """Names of the models that have a script, such as qwen2.5-3B."""
    return sorted(path.stem for path in FOLDER.glob("*.sh"))


def known_model(checkpoint: str) -> KnownModel | None:
    """The known model with whose name the checkpoint's folder begins, such as models/Qwen2.5-3B-Instruct; or None."""
    name = PurePath(checkpoint).name.lower()
    matches = [known for known in known_models() if name == known.lower() or name.startswith(f"{known.lower()}-")]
    return read_model_script(FOLDER / f"{matches[0]}.sh") if matches else None


def read_model_script(path: Path) -> KnownModel:
    """Read MODEL_ARGS and MAX_POSITION_EMBEDDINGS of a script; ValueError if its flags do not describe a model."""
    text = path.read_text(encoding="utf-8")
    array, context = _MODEL_ARGS.search(text), _CONTEXT.search(text)
    if array is None:
        raise ArgumentsError(f"{path}: expected MODEL_ARGS=( ... ) with one flag on each line, found none")
    try:
        flags = parse_args(shlex.split(array["words"], comments=True), model=ModelArgs)
    except ValueError as error:
        raise ArgumentsError(f"{path}: {error}") from None
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED if getattr(flags, name) is None]
    if missing:
        raise ArgumentsError(f"{path}: expected {', '.join(missing)} in MODEL_ARGS, found no such flag; add it")
    script = f"{FOLDER.parent.name}/{FOLDER.name}/{path.name}"
    return KnownModel(script, _complete(flags), int(context["tokens"]) if context else None)


def _complete(flags: ModelArgs) -> dict[str, Any]:
    """The flags with defaults filled in: switches that are not given are off, and the heads share the width equally."""
    values = flags.model_dump()
    values |= {name: bool(values[name]) for name in _SWITCHES}
    heads = values["num_attention_heads"]
    values["num_query_groups"] = values["num_query_groups"] or heads
    values["kv_channels"] = values["kv_channels"] or values["hidden_size"] // heads
    if values["num_experts"]:
        values["moe_router_pre_softmax"] = bool(values["moe_router_pre_softmax"])
    return values
