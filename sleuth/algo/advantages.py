"""Advantages from the rewards of a step: one number for each sample, the same for all of its trained tokens.

They are computed once for the whole step, before samples are spread over ranks, so that the parallel layout
cannot change them. Credit for single tokens is not computed here: nothing sees their log-probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def equal_groups(rewards: Tensor) -> Tensor:
    """Which groups of `rewards` [G, n] have n equal rewards, and so no signal to learn from: bool [G]."""
    _check_rewards(rewards)
    return rewards.amax(dim=1) == rewards.amin(dim=1)


def group_advantages(rewards: Tensor, *, normalize_std: bool) -> Tensor:
    """Advantages [G, n] from rewards [G, n]: reward - group mean, over the deviation if `normalize_std`.

    A = (r - mean(r)) / (std(r) + 1e-6), with the unbiased deviation: GRPO (Shao et al. 2024,
    arXiv 2402.03300); without the division: "Dr. GRPO" (Liu et al. 2025, arXiv 2503.20783).

    The result is exactly 0 in groups whose rewards are all equal (even where their mean is rounded) and in groups
    of one. Raises ValueError for another shape, an empty group or a reward that is not finite.
    """
    equal = equal_groups(rewards)
    exact = rewards.double()
    advantages = exact - exact.mean(dim=1, keepdim=True)
    if normalize_std and rewards.shape[1] > 1:
        advantages = advantages / (exact.std(dim=1, keepdim=True) + STD_EPSILON)
    # The mean of equal floats may differ from them in the last bit; that is noise, not a signal.
    return advantages.masked_fill(equal[:, None], 0.0).to(_float_type(rewards))


def step_advantages(rewards: Tensor, tokens: Tensor) -> Tensor:
    """Advantages [G, n]: rewards [G, n] normalised over the step; `tokens` [G, n] counts trained tokens of samples.

    A = (r - mean) / (std + 1e-6), with mean and std over all trained tokens, each having its sample's reward:
    REINFORCE++ (Hu 2025, arXiv 2501.03262) with a discount of 1 and the KL penalty in the loss, not the reward. If the
    group mean was subtracted from the rewards before, it is the baseline form. The result is exactly 0 if all samples
    with trained tokens have the same reward, and for a sample without trained tokens. Raises ValueError as
    `group_advantages` does, or for another shape of `tokens`.
    """
    _check_rewards(rewards)
    if tokens.shape != rewards.shape:
        raise ValueError(f"expected tokens of shape {list(rewards.shape)}, found {list(tokens.shape)}")
    trained = rewards[tokens > 0]
    if trained.numel() == 0 or bool((trained == trained[0]).all()):
        return torch.zeros_like(rewards, dtype=_float_type(rewards))
    exact, weights = rewards.double(), tokens.double() / tokens.sum()
    centered = exact - (exact * weights).sum()
    deviation = (centered.square() * weights).sum().sqrt()
    return (centered / (deviation + STD_EPSILON)).masked_fill(tokens == 0, 0.0).to(_float_type(rewards))


def _check_rewards(rewards: Tensor) -> None:
    if rewards.dim() != 2 or 0 in rewards.shape:
        raise ValueError(f"expected rewards [groups, samples of a group], found the shape {list(rewards.shape)}")
    if not bool(torch.isfinite(rewards).all()):
        group, member = (~torch.isfinite(rewards)).nonzero()[0].tolist()
        raise ValueError(
            f"reward of sample {member} in group {group} is {float(rewards[group, member])}; expected a finite number. "
            "Check the reward hook"
        )


def _float_type(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
