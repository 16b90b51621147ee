"""The dynamic-sampling filters, alone and as the flag names them."""

import pytest

from sleuth.hooks import load_hook
from sleuth.rollout.filters import nonzero_reward_std
from sleuth.sample import Sample, TokenTrace


def group(*rewards):
    return [Sample(i, 0, "question", TokenTrace([1]), reward=reward) for i, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "keep"),
    [
        ((0.0, 0.0, 0.0), False),
        ((1.0, 1.0), False),
        ((0.1,) * 10, False),
        ((0.1 + 0.2,) * 3, False),
        ((0.7,), False),
        ((), False),
        ((0, 0.0), False),
        ((0.0, 1.0), True),
        ((0.2, 0.2, 0.2, 0.8), True),
    ],
)
def test_groups_whose_rewards_differ_are_kept(rewards, keep):
    assert nonzero_reward_std(None, group(*rewards)) is keep


def test_sample_without_reward_is_named():
    with pytest.raises(ValueError, match="sample 1 of group 0"):
        nonzero_reward_std(None, group(0.0, None))


def test_the_flag_finds_it():
    assert load_hook("sleuth.rollout.filters.nonzero_reward_std", "filter") is nonzero_reward_std
