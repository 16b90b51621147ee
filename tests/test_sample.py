"""What a trajectory accepts."""

import math

import pytest

from sleuth.sample import TokenTrace


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
