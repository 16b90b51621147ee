"""Intervals and tests against exact values and independent computations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tools.evaluation.statistics import Tally, interval, mcnemar, paired_difference, pass_at_k


def tally(*columns: list[float], names: tuple[str, ...] = ("em",)) -> Tally:
    values = np.array(columns, dtype=float).T
    return Tally(names, np.nan_to_num(values), (~np.isnan(values)).astype(float))


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = tally(values.tolist())
    low, high = interval(found.draws)
    error = values.std() / 20
    assert found.means()[0] == pytest.approx(values.mean())
    assert low[0] == pytest.approx(values.mean() - 1.96 * error, abs=0.2 * error)
    assert high[0] == pytest.approx(values.mean() + 1.96 * error, abs=0.2 * error)


def test_what_some_questions_lack_is_left_out_of_the_mean() -> None:
    found = tally([1.0, 0.0, 1.0, 1.0], [np.nan, 2.0, np.nan, 4.0], [np.nan] * 4, names=("em", "seconds", "none"))
    means = found.means()
    assert means[:2].tolist() == [0.75, 3.0]
    low, high = interval(found.draws)
    assert 2.0 <= low[1] <= 3.0 <= high[1] <= 4.0
    assert np.isnan([means[2], low[2], high[2]]).all()


def test_draws_are_the_same_each_time() -> None:
    found = tally([0.0, 1.0, 1.0])
    assert (found.resampled(10) == found.resampled(10)).all()


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 0, 2), (4, 1, 2), (4, 2, 3), (5, 5, 1), (6, 3, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int, right: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_too_few_samples() -> None:
    with pytest.raises(ValueError, match="expected 1 <= k <= 4 samples, found k = 5"):
        pass_at_k(4, 1, 5)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 5), (3, 3), (2, 9), (10, 1)])
def test_mcnemar_counts_the_throws_of_a_coin(first: int, second: int) -> None:
    total = first + second
    throws = [sum(throw) for throw in itertools.product([0, 1], repeat=total)]
    as_uneven = sum(abs(2 * wins - total) >= abs(first - second) for wins in throws) / len(throws)
    assert mcnemar(first, second) == pytest.approx(as_uneven)
    assert mcnemar(first, second) == mcnemar(second, first)


def test_mcnemar_of_many_questions() -> None:
    assert mcnemar(5000, 5000) == 1.0
    assert 0 < mcnemar(4800, 5200) < 1e-4


def test_a_difference_is_that_of_the_same_questions() -> None:
    random = np.random.default_rng(2)
    hard = random.random(300)
    first = (hard < 0.5).astype(float)
    second = (hard < 0.6).astype(float)
    found = paired_difference(tally(first.tolist()), tally(second.tolist()))["em"]
    assert found.value == pytest.approx(second.mean() - first.mean())
    assert 0 < found.low < found.value < found.high
    assert found.p < 0.01
    assert found.high - found.low < 0.1  # unpaired it would be 0.16
    same = paired_difference(tally(first.tolist()), tally(first.tolist()))["em"]
    assert (same.value, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)


def test_only_shared_measures_are_compared() -> None:
    first = tally([1.0, 0.0], [1.0, 1.0], names=("em", "f1"))
    second = tally([2.0, 2.0], [1.0, 1.0], names=("f1", "style"))
    assert {name: found.value for name, found in paired_difference(first, second).items()} == {"f1": 1.0}
    with pytest.raises(ValueError, match="expected the same questions in both, found 2 and 1"):
        paired_difference(first, tally([1.0]))
