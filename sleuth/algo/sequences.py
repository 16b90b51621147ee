"""Sums over each sequence of a packed row, also where context-parallel ranks hold parts of it.

`reduce` is how a caller completes such sums: it is given this rank's sums (one call, one tensor) and
returns those over all context-parallel ranks, for example by an all-reduce. No gradient flows through it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sleuth.algo.losses import masked

Reduce = Callable[[Tensor], Tensor]


def sequence_sums(values: Tensor, sample_ids: Tensor, num_sequences: int, reduce: Reduce | None = None) -> Tensor:
    """Sum `values` [..., T] over the tokens of each sequence: [..., num_sequences], without gradient.

    `sample_ids` [T] says which sequence a token belongs to.
    """
    values = values.detach()
    sums = values.new_zeros(*values.shape[:-1], num_sequences).index_add_(-1, sample_ids, values)
    return sums if reduce is None else reduce(sums)


def sequence_means(
    values: Tensor, mask: Tensor, sample_ids: Tensor, num_sequences: int, reduce: Reduce | None = None
) -> Tensor:
    """Mean of `values` [T] over the tokens of each sequence where `mask` [T] is not zero: [num_sequences].

    0 for a sequence without such tokens. Values at masked tokens do not matter.
    """
    counted = (mask != 0).to(values.dtype)
    totals, counts = sequence_sums(torch.stack([masked(values, mask), counted]), sample_ids, num_sequences, reduce)
    return totals / counts.clamp(min=1.0)


def sample_mean_weights(
    loss_mask: Tensor, sample_ids: Tensor, num_sequences: int, reduce: Reduce | None = None
) -> Tensor:
    """`loss_mask` [T] over its sum in each sequence: adds up to 1 in every sequence that has a trained token."""
    sums = sequence_sums(loss_mask, sample_ids, num_sequences, reduce)
    return loss_mask / torch.where(sums > 0, sums, 1.0)[sample_ids]
