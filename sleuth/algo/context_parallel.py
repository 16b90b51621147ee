"""Which tokens of a packed row each context-parallel rank holds.

Zigzag layout: every sequence is cut into 2 * cp equal chunks and rank r holds chunks r and
2 * cp - 1 - r, so that causal attention costs every rank the same. Sequences are padded to a
multiple of 2 * cp beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padded_length(length: int, multiple: int) -> int:
    """`length` rounded up to a multiple of `multiple`; at least `multiple` itself."""
    if length < 0 or multiple < 1:
        raise ValueError(f"expected length >= 0 and multiple >= 1, found {length} and {multiple}")
    return max(1, -(-length // multiple)) * multiple


def pad_multiple(cp_size: int, tp_size: int = 1) -> int:
    """What must divide every sequence length: 2 * cp for the zigzag layout, times tp for sequence parallelism."""
    return (2 * cp_size if cp_size > 1 else 1) * tp_size


def zigzag_index(lengths: Sequence[int], cp_size: int, rank: int) -> Tensor:
    """Positions in the packed row [T] of the tokens that `rank` holds, in the rank's order: int64 [T / cp_size].

    `lengths` are the padded lengths of the packed sequences, and T is their sum. Raises ValueError if a length is
    not divisible by 2 * cp_size, or the rank is out of range.
    """
    if not 0 <= rank < cp_size:
        raise ValueError(f"expected a context-parallel rank in [0, {cp_size}), found {rank}")
    if cp_size == 1:
        return torch.arange(sum(lengths))
    uneven = [length for length in lengths if length % (2 * cp_size)]
    if uneven:
        raise ValueError(
            f"expected lengths that divide by 2 * cp_size = {2 * cp_size}, found {uneven[:4]}; "
            "pad them with padded_length first"
        )
    length = torch.tensor(lengths, dtype=torch.int64)
    chunk = length // (2 * cp_size)
    starts = length.cumsum(0) - length
    halves = torch.stack([starts + rank * chunk, starts + (2 * cp_size - 1 - rank) * chunk], dim=1)
    return _ranges(halves.flatten(), chunk.repeat_interleave(2))


def zigzag_inverse(lengths: Sequence[int], cp_size: int) -> Tensor:
    """The index [T] that restores the order of the packed row from the ranks' parts, concatenated in rank order."""
    gathered = torch.cat([zigzag_index(lengths, cp_size, rank) for rank in range(cp_size)])
    inverse = torch.empty_like(gathered)
    inverse[gathered] = torch.arange(len(gathered))
    return inverse


def _ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """The concatenation of arange(start, start + count) over all pairs (start, count)."""
    first = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum())) + (starts - first).repeat_interleave(counts)
