"""What is taken off the reward hook's rewards before they are trained on; evaluation is not touched.

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

    What counts is a trajectory's longest turn: it is turns that `--rollout-max-response-len` cuts off. The penalty
    is put among the reward's components as `overlong_penalty`. Filters have seen the reward without it.
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
    """Tokens of the trajectory's longest generation; 0 if the model generated nothing."""
    return max((s.end - s.start for s in sample.trace.segments if s.source == "model"), default=0)
