"""Compares what a torch_dist checkpoint and a Hugging Face folder compute: float32 logits of a few fixed tokens."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from sleuth.megatron.model import PolicyModel
from sleuth.megatron.streaming import StreamedLoad

TOLERANCE = 1e-3
"""Largest difference of two logits, as a share of the largest logit; float32 differs by some 1e-6 of it a layer."""
_TOKENS = 48


def fits_in_memory(num_parameters: int) -> bool:
    """Whether the free memory holds one float32 copy of the model and what a forward pass needs."""
    return num_parameters * 4 * 1.2 + 500e6 < psutil.virtual_memory().available


def hf_logits(folder: Path, dtype: torch.dtype) -> Tensor:
    """Logits [T, V] of transformers' model in float32, after its weights were rounded to `dtype`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
        logits: Tensor = model(_probe(model.config.vocab_size)[None]).logits[0]
    del model
    gc.collect()
    return logits


def checkpoint_logits(chunks: Sequence[PolicyModel], checkpoint: Path) -> Tensor:
    """Logits [T, V] of a megatron model after loading a checkpoint."""
    (model,) = chunks
    stored = StreamedLoad(chunks, checkpoint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(stored(parameter))
        return model.eval().logits(_probe(model.shape.vocab_size)).float().cpu()


def compare(found: Tensor, expected: Tensor) -> None:
    """ValueError naming difference and tolerance if logits [T, V] are not the same."""
    difference, scale = (found - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= TOLERANCE * scale:  # NaN must not pass
        raise ValueError(
            f"after the conversion the model computes something else: a logit differs by {difference:.3g}, expected at "
            f"most {TOLERANCE * scale:.3g} ({TOLERANCE:g} of the largest, {scale:.3g}) from what transformers "
            "computes; nothing is kept. Please report it with the model's name; --no-check converts regardless"
        )


def _probe(vocab_size: int) -> Tensor:
    """Token ids [T] spread over the whole vocabulary, always the same ones."""
    return torch.arange(1, _TOKENS + 1) * 7919 % vocab_size
