"""Means with confidence intervals, pass@k, and paired tests. Pure numbers: nothing here knows samples or files.

Intervals come from the bootstrap over questions (Efron 1979, percentiles): the samples of one question depend on each
other, so a question is drawn with all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

REPEATS = 2000
LEVEL = 0.95
SEED = 20240229

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tally:
    """For each of Q questions the sum of each of M measures over its samples, and over how many: both [Q, M].

    A measure is the sum of its numerators over that of its denominators.
    """

    names: tuple[str, ...]
    numerators: Floats
    denominators: Floats

    def means(self) -> Floats:
        """[M]; NaN where nothing was counted."""
        return _ratio(self.numerators.sum(0), self.denominators.sum(0))

    @cached_property
    def draws(self) -> Floats:
        """The means of draws of Q questions with replacement, [REPEATS, M]; always the same draws."""
        return self.resampled(REPEATS)

    def resampled(self, repeats: int) -> Floats:
        """As `draws`, with another number of them."""
        random = np.random.default_rng(SEED)
        questions = len(self.numerators)
        means = np.empty((repeats, len(self.names)))
        for repeat in range(repeats):
            counts = np.bincount(random.integers(questions, size=questions), minlength=questions).astype(float)
            means[repeat] = _ratio(counts @ self.numerators, counts @ self.denominators)
        return means


def _ratio(numerators: Floats, denominators: Floats) -> Floats:
    return np.divide(numerators, denominators, out=np.full_like(numerators, np.nan), where=denominators > 0)


def interval(resampled: Floats) -> tuple[Floats, Floats]:
    """The bounds of the 95% interval of each column of [repeats, M]: two arrays [M]."""
    outside = 100 * (1 - LEVEL) / 2
    unknown = np.isnan(resampled).all(0)
    low, high = np.nanpercentile(np.where(unknown, 0.0, resampled), [outside, 100 - outside], axis=0)
    return np.where(unknown, np.nan, low), np.where(unknown, np.nan, high)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of `k` of the samples is right: the unbiased estimate of Chen et al. 2021 (Codex), eq. 1."""
    if not 1 <= k <= samples:
        raise ValueError(f"expected 1 <= k <= {samples} samples, found k = {k}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test, from the questions that only one of two models answers rightly.

    It is the chance of a split at least so uneven if each of these questions were won by a fair coin.
    """
    total, smaller = only_first + only_second, min(only_first, only_second)
    if total == 0:
        return 1.0
    tail = term = 1
    for k in range(smaller):
        term = term * (total - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / 2**total)


@dataclass(frozen=True, slots=True)
class Difference:
    """Second minus first, over the same questions."""

    value: float
    low: float
    high: float
    p: float
    """Two-sided: twice the share of bootstrap draws on the other side of zero."""


def paired_difference(first: Tally, second: Tally) -> dict[str, Difference]:
    """The difference of each measure that both have, with an interval from draws of the same questions for both."""
    if len(first.numerators) != len(second.numerators):
        raise ValueError(
            f"expected the same questions in both, found {len(first.numerators)} and {len(second.numerators)}"
        )
    names = [name for name in first.names if name in second.names]
    here, there = [first.names.index(name) for name in names], [second.names.index(name) for name in names]
    values = second.means()[there] - first.means()[here]
    draws = second.draws[:, there] - first.draws[:, here]
    low, high = interval(draws)
    beyond = np.minimum(np.mean(draws <= 0, axis=0), np.mean(draws >= 0, axis=0))
    p = np.minimum(1.0, 2 * np.maximum(beyond, 1 / (len(draws) + 1)))
    return {
        name: Difference(float(values[i]), float(low[i]), float(high[i]), float(p[i])) for i, name in enumerate(names)
    }
