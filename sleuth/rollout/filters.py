"""Filters for `--dynamic-sampling-filter-path`, which decide whether a group is trained on.

A filter is `def filter(args, group: list[Sample]) -> bool`: whether to keep a scored group. A rejected
group is replaced by the next prompt, until the step is full. Write your own in any module, or use one from here:

    --dynamic-sampling-filter-path sleuth.rollout.filters.nonzero_reward_std
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sleuth.arguments import Args
    from sleuth.sample import Sample


def nonzero_reward_std(args: Args, group: list[Sample]) -> bool:
    """Keep groups whose rewards differ: in all others every advantage is zero (DAPO, arXiv 2503.14476).

    It compares the rewards themselves, because rounding can make the standard deviation of equal floats larger
    than zero. Raises ValueError for a sample without a reward.
    """
    return len({_reward(sample) for sample in group}) > 1


def _reward(sample: Sample) -> float:
    if sample.reward is None:
        raise ValueError(
            f"sample {sample.index} of group {sample.group_index} ({sample.status}) has no reward; "
            "expected scored samples: the reward hook runs before the filter"
        )
    return sample.reward
