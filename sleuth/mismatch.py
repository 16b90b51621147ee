"""What engine and trainer say of the tokens that are trained on, packed for corrections of their mismatch.

Knows neither weights nor bounds: those are the business of the hook, `mis.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

Level = Literal["token", "sequence", "geometric"]

MAX_EXPONENT = 20.0
"""Log-ratios are bounded to [-20, 20] nats before `exp`: a ratio lies between 2e-9 and 4.9e8."""


@dataclass(frozen=True, slots=True)
class TrainableTokens:
    """The trainable tokens [N] of a block's n samples, one after the other, in float64. Masked ones are not among them.

    index: [N] place in the row of all `size` response tokens. counts: [n] tokens of each sample. train, rollout: [n]
    sums of log-probabilities. log_ratio: [N] trainer's minus engine's; bounded: the same, bounded; excess: the ratio
    minus 1. nonfinite: tokens and samples that were left out for a NaN or infinite log-probability.
    """

    index: Tensor
    size: int
    counts: Tensor
    train: Tensor
    rollout: Tensor
    log_ratio: Tensor
    bounded: Tensor
    excess: Tensor
    nonfinite: tuple[int, int]

    @classmethod
    def pack(
        cls, train: Sequence[Tensor], rollout: Sequence[Tensor], masks: Sequence[Tensor], lengths: Sequence[int]
    ) -> Self:
        """From lists with a 1-D tensor of `lengths` a sample; a token is trainable where its mask is not 0.

        Samples with a trainable token whose log-probability is NaN or infinite are left out, and counted.
        """
        index = _places(join(masks) != 0)
        ends = torch.tensor([0, *lengths], device=index.device).cumsum(0)
        rows = [join(values).index_select(0, index).double() for values in (train, rollout)]
        tokens = cls._of(index, ends, rows[0], rows[1], (0, 0))
        if bool((tokens.train + tokens.rollout).isfinite().all()):  # else look which tokens it is
            return tokens
        bad = ~(rows[0].isfinite() & rows[1].isfinite())
        bad_samples = tokens.per_sample(bad.double()) > 0
        good = ~tokens.spread(bad_samples, "sequence")
        return cls._of(index[good], ends, rows[0][good], rows[1][good], (int(bad.sum()), int(bad_samples.sum())))

    @classmethod
    def _of(cls, index: Tensor, ends: Tensor, train: Tensor, rollout: Tensor, nonfinite: tuple[int, int]) -> Self:
        counts = torch.searchsorted(index, ends).diff()
        train_sums, rollout_sums = (_per_sample(row, counts) for row in (train, rollout))
        ratio = train - rollout
        bounded = bound_exponent(ratio)
        excess = torch.expm1(bounded)
        return cls(index, int(ends[-1]), counts, train_sums, rollout_sums, ratio, bounded, excess, nonfinite)

    def per_sample(self, values: Tensor) -> Tensor:
        """Sums of values [N] over each sample: [n]."""
        return _per_sample(values, self.counts)

    def units(self, level: Level) -> Tensor:
        """Log-ratios of what a level weighs: of tokens [N], or of samples [n], 0 where there is no token."""
        if level == "token":
            return self.log_ratio
        total = self.train - self.rollout
        return total if level == "sequence" else total / self.counts.clamp(min=1)

    def spread(self, units: Tensor, level: Level) -> Tensor:
        """Each token's [N] value of its unit."""
        return units if level == "token" else units.repeat_interleave(self.counts)

    def count(self, units: Tensor, level: Level) -> int:
        """Tokens of the units that are True."""
        return int(units.sum() if level == "token" else self.counts[units].sum())

    def to_row(self, values: Tensor) -> Tensor:
        """Values [N] -> those of all response tokens, 0 at masked ones."""
        return values.new_zeros(self.size).scatter_(0, self.index, values)

    def new_masks(self, kept: Tensor | None, masks: Sequence[Tensor]) -> list[Tensor]:
        """The masks without the tokens that are not kept (None: all are)."""
        row = self.to_row(torch.ones_like(self.index, dtype=torch.bool) if kept is None else kept)
        return [mask * part for mask, part in zip(masks, row.split([len(mask) for mask in masks]), strict=True)]


def join(values: Sequence[Tensor]) -> Tensor:
    """One row of all samples, also of none."""
    return torch.cat(list(values)) if len(values) else torch.zeros(0)


def bound_exponent(log_ratio: Tensor) -> Tensor:
    """Within the range that `exp` is taken of."""
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT)


def _places(mask: Tensor) -> Tensor:
    """Where `mask` [T] is true; on a CPU numpy finds it four times sooner."""
    return mask.nonzero().squeeze(1) if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))


def _per_sample(values: Tensor, counts: Tensor) -> Tensor:
    """Sums of values [N] over samples of `counts` [n] tokens each; numpy's is six times quicker than torch's."""
    if values.is_cuda:
        return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)
    sums, some = values.new_zeros(len(counts)), counts > 0
    starts = (counts.cumsum(0) - counts)[some]
    if len(starts):  # the empty sum of a sample without tokens is unknown to reduceat
        with np.errstate(invalid="ignore"):  # a sum that is not finite is how such tokens are found
            sums[some] = torch.from_numpy(np.add.reduceat(values.numpy(), starts.numpy()))
    return sums
