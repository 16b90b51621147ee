"""What would end a run after minutes, told before anything starts: data that do not fit, a disk that is too small."""

from __future__ import annotations

import math
import shutil

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sleuth.arguments import Args, check_tokenizer
from sleuth.data import check_rows, check_sft_rows
from sleuth.rollout.engine_client import embedding_size


def check_data(args: Args) -> None:
    """ValueError or OSError if tokenizer, prompts or labels do not fit, as far as the first rows tell."""
    tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
    check_tokenizer(tokenizer, embedding_size(args.hf_checkpoint))
    if args.loss_type == "sft":
        check_sft_rows(args.prompt_data, tokenizer)
        return
    check_rows(args.prompt_data, args, tokenizer)
    for path in args.eval_sets.values():
        check_rows(path, args, tokenizer, evaluation=True)


def check_disk(args: Args) -> str | None:
    """ValueError if `--save` has no room for one checkpoint; a warning if not for all that are to be kept."""
    if args.save is None:
        return None
    size = checkpoint_bytes(args)
    saves = math.ceil(args.num_rollout / args.save_interval)
    kept = min(saves, args.save_keep + 1) if args.save_keep else saves  # the oldest goes once the newest is whole
    folder = next(parent for parent in (args.save, *args.save.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(folder).free
    found = f"{folder} has {_gb(free)} free"
    if free < size:
        raise ValueError(
            f"--save: expected room for a checkpoint, about {_gb(size)}; {found}; make room, or save elsewhere"
        )
    if free < kept * size:
        return (
            f"{kept} checkpoints of about {_gb(size)} are to lie in --save at once, and {found}: make room, or save "
            "fewer (--save-keep, --save-interval)"
        )
    return None


def checkpoint_bytes(args: Args) -> int:
    """About what a training checkpoint takes: weights, and Adam's two moments beside float32 weights."""
    with torch.device("meta"):  # no memory, no weights
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.hf_checkpoint))
    bfloat16 = args.dtype == "bfloat16" or (args.dtype == "auto" and torch.cuda.is_available())
    return model.num_parameters() * (2 + 4 + 8 if bfloat16 else 4 + 8)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
