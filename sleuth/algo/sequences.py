"""Sums over each sequence of a packed row, even if context-parallel ranks hold parts of the sequences.

For that case a caller passes `reduce`: it is called once with a tensor of this rank's sums and returns the sums over
all context-parallel ranks, for example by an all-reduce. No gradient flows through it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sleuth.algo.losses import masked

Reduce = Callable[[Tensor], Tensor]


def sequence_sums(values: Tensor, sample_ids: Tensor, num_sequences: int, reduce: Reduce | None = None) -> Tensor:
    """The sums of `values` [..., T] over the tokens of each sequence: [..., num_sequences], without gradient.

    `sample_ids` [T] names the sequence of each token, from 0.
    """
    values = values.detach()
    sums = values.new_zeros(*values.shape[:-1], num_sequences).index_add_(-1, sample_ids, values)
    return sums if reduce is None else reduce(sums)


def sequence_means(
    values: Tensor, mask: Tensor, sample_ids: Tensor, num_sequences: int, reduce: Reduce | None = None
) -> Tensor:
    """The mean of `values` [T] over those tokens of each sequence where `mask` [T] is not zero: [num_sequences].

    It is 0 for a sequence without such tokens. Values where the mask is zero are ignored.
    """
    counted = (mask != 0).to(values.dtype)
    totals, counts = sequence_sums(torch.stack([masked(values, mask), counted]), sample_ids, num_sequences, reduce)
    return totals / counts.clamp(min=1.0)


def sample_mean_weights(
    loss_mask: Tensor, sample_ids: Tensor, num_sequences: int, reduce: Reduce | None = None
) -> Tensor:
    """`loss_mask` [T] divided by its sum over the sequence: it sums to 1 in each sequence with trained tokens."""
    sums = sequence_sums(loss_mask, sample_ids, num_sequences, reduce)
    return loss_mask / torch.where(sums > 0, sums, 1.0)[sample_ids]
