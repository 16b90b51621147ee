"""Overlong shaping of a step's rewards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.rollout.reward_shaping import longest_turn, shape_rewards
from sleuth.sample import Sample, TokenTrace


def sample(*turns: int, reward: float = 1.0) -> Sample:
    """A trajectory of turns of that many tokens, each followed by an observation of 50."""
    trace = TokenTrace([1, 2, 3])
    for length in turns:
        trace.append_model([7] * length, [-1.0] * length)
        trace.append_observation([8] * 50)
    return Sample(0, 0, "prompt", trace, reward=reward)


def settings(**changes: Any) -> Any:
    values = {"overlong_buffer_len": 10, "overlong_penalty_factor": 0.5, "rollout_max_response_len": 40}
    return SimpleNamespace(**(values | changes))


def test_the_longest_turn_counts_and_observations_do_not():
    assert longest_turn(sample(3, 9, 4)) == 9
    assert longest_turn(sample()) == 0


def test_rewards_fall_over_the_buffer():
    samples = [sample(30, 2), sample(3, 35), sample(40), sample(0, reward=0.25)]
    metrics = shape_rewards(settings(), samples)
    assert [s.reward for s in samples] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert [s.reward_components["overlong_penalty"] for s in samples] == pytest.approx([0.0, -0.25, -0.5, 0.0])
    assert metrics == {"rollout/overlong_samples": 2.0}


def test_without_a_buffer_nothing_changes():
    samples = [sample(40)]
    assert shape_rewards(settings(overlong_buffer_len=None), samples) == {}
    assert (samples[0].reward, samples[0].reward_components) == (1.0, {})
