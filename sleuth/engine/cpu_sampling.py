"""Draws tokens on a CPU with one random number each.

SGLang draws a random number for every word of the vocabulary, which on a CPU takes longer than the rest of the decode
step of a small model. Here the cumulative probabilities are searched for one number, first over blocks of words, then
within a block. Sums are in float64, so that a rare word keeps its probability.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Words of a block."""


def draw_tokens(
    original: Callable[..., Tensor], probs: Tensor, sampling_seed: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Ids [B], int32, drawn from `probs` [B, V]; with seeds for each request it is left to SGLang."""
    if sampling_seed is not None:
        return original(probs, sampling_seed, *args, **kwargs)
    return draw(probs).to(torch.int32)


def draw(probs: Tensor) -> Tensor:
    """Ids [B] drawn from the rows of `probs` [B, V], of any sum; a word of probability 0 is never drawn."""
    rows, words = probs.shape
    blocks = F.pad(probs, (0, -words % BLOCK)).view(rows, -1, BLOCK)
    block, rest = _search(blocks.sum(-1, dtype=torch.float64), torch.rand(rows, 1, dtype=torch.float64))
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    word, _ = _search(inside.double(), rest)
    return (block * BLOCK + word).squeeze(1)


def _search(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Where `uniform` [B, 1], from [0, 1), falls among `weights` [B, n]: the index, and how far into it, in [0, 1)."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:].contiguous()
    # Rounding may lift the product to the total, behind the last word.
    wanted = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(sums, wanted, right=True)
    weight = weights.gather(1, index)
    into = (wanted - (sums.gather(1, index) - weight)) / weight
    return index, into.clamp(0.0, 1.0 - 2.0**-53)
