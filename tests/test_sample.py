"""What a trajectory accepts."""

import math

import numpy as np
import pytest

from sleuth.sample import Sample, TokenTrace


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
def test_a_wrong_log_prob_is_named_by_its_position(value: float) -> None:
    trace = TokenTrace([1])
    with pytest.raises(ValueError, match=f"found {value} at token 1 of a turn"):
        trace.append_model([2, 3, 4], [-0.1, value, -0.2])
    assert len(trace) == 1


@pytest.mark.parametrize("value", [0.0, 1e-4, -3e38, -1e308])
def test_a_log_prob_is_accepted_however_small_and_a_rounding_above_zero(value: float) -> None:
    trace = TokenTrace([1])
    trace.append_model([2, 3], [value, value])
    assert trace.log_probs == [value, value]


def test_numbers_are_reported_as_metrics_and_the_rest_as_notes():
    sample = Sample(0, 0, "p", TokenTrace([1]))
    sample.report(turns=2, seconds=0.5, hit=True, words=np.int64(3), f1=np.float32(0.25), answer=None, parts=["a"])
    assert sample.rollout_metrics == {"turns": 2.0, "seconds": 0.5, "hit": 1.0, "words": 3.0, "f1": 0.25}
    assert sample.notes == {"answer": None, "parts": ["a"]}
