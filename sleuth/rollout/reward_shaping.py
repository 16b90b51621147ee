"""Penalties on the rewards of the reward hook before they are trained on; evaluation stays as it is.

The KL penalty (`--kl-coef`) is not here: it needs the trainer's log-probabilities (`sleuth.megatron.kl_penalty`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sleuth.algo.overlong import overlong_penalty

if TYPE_CHECKING:
    from sleuth.arguments import Args
    from sleuth.sample import Sample


def shape_rewards(args: Args, samples: Sequence[Sample]) -> dict[str, float]:
    """Add DAPO's overlong penalty to the samples' rewards, if `--overlong-buffer-len` asks for it; returns metrics.

    The longest turn of a trajectory decides, because `--rollout-max-response-len` limits turns. The penalty becomes a
    component of the reward, `overlong_penalty`. Filters have already seen the reward without it.
    """
    if args.overlong_buffer_len is None:
        return {}
    penalties = overlong_penalty(
        torch.tensor([longest_turn(sample) for sample in samples]),
        max_length=args.rollout_max_response_len,
        buffer=args.overlong_buffer_len,
        factor=args.overlong_penalty_factor,
    ).tolist()
    for sample, penalty in zip(samples, penalties, strict=True):
        assert sample.reward is not None, "samples are scored before their rewards are shaped"
        sample.reward += penalty
        sample.reward_components["overlong_penalty"] = penalty
    return {"rollout/overlong_samples": float(sum(penalty < 0 for penalty in penalties))}


def longest_turn(sample: Sample) -> int:
    """The number of tokens in the longest turn of the model; 0 if it generated nothing."""
    return max((s.end - s.start for s in sample.trace.segments if s.source == "model"), default=0)
