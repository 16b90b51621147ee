"""The choices of `--advantage-estimator`: how rewards become advantages, and advantages a loss.

| estimator | advantage of a sample | loss of a token |
|---|---|---|
| grpo | reward against its group | clipped surrogate of the token's ratio |
| gspo | reward against its group | clipped surrogate of the sequence's ratio |
| cispo | reward against its group | log-probability, weighted by the bounded ratio |
| importance_sampling | reward - group mean | unclipped ratio to the engine's probability |
| reinforce_plus_plus | reward, normalised over the step | as grpo |
| reinforce_plus_plus_baseline | reward - group mean, normalised over the step | as grpo |
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from sleuth.algo.advantages import group_advantages, step_advantages
from sleuth.algo.losses import PolicyLoss, bounded, masked, policy_loss, surrogate_loss
from sleuth.algo.names import Estimator
from sleuth.algo.sequences import Reduce, sequence_means


def estimate_advantages(estimator: Estimator, rewards: Tensor, tokens: Tensor, *, normalize_std: bool) -> Tensor:
    """Advantages [G, n] from rewards [G, n]; `tokens` [G, n] counts the trained tokens of each sample.

    Only grpo, gspo and cispo use `normalize_std` (off with --disable-grpo-std-normalization).
    """
    _check(estimator)
    if estimator == "reinforce_plus_plus":
        return step_advantages(rewards, tokens)
    if estimator == "reinforce_plus_plus_baseline":
        return step_advantages(group_advantages(rewards, normalize_std=False), tokens)
    return group_advantages(rewards, normalize_std=normalize_std and estimator != "importance_sampling")


def estimator_loss(
    estimator: Estimator,
    train_log_probs: Tensor,
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sample_ids: Tensor,
    num_sequences: int,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
    reduce: Reduce | None = None,
) -> PolicyLoss:
    """The loss of an estimator. All tensors are [T]: the packed row, or this rank's part under context parallelism.

    `train_log_probs` come from the trainer now and carry the gradient, `old_log_probs` from the trainer before the
    step, `rollout_log_probs` from the engine. Only gspo uses `sample_ids`, `num_sequences` and `reduce` (see
    `sleuth.algo.sequences`); give `reduce` if and only if sequences are spread over context-parallel ranks.
    """
    _check(estimator)
    if estimator == "importance_sampling":
        return importance_sampling_loss(train_log_probs, rollout_log_probs, advantages, mask=mask)
    if estimator == "cispo":
        return cispo_loss(train_log_probs, old_log_probs, advantages, eps_clip_high=eps_clip_high, mask=mask)
    if estimator == "gspo":
        return gspo_loss(
            train_log_probs, old_log_probs, advantages, mask=mask, sample_ids=sample_ids, num_sequences=num_sequences,
            eps_clip=eps_clip, eps_clip_high=eps_clip_high, eps_clip_c=eps_clip_c, reduce=reduce,
        )  # fmt: skip
    return policy_loss(
        train_log_probs, old_log_probs, advantages, mask=mask,
        eps_clip=eps_clip, eps_clip_high=eps_clip_high, eps_clip_c=eps_clip_c,
    )  # fmt: skip


def gspo_loss(
    train_log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    sample_ids: Tensor,
    num_sequences: int,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
    reduce: Reduce | None = None,
) -> PolicyLoss:
    """Clipped surrogate of the sequence's ratio s = exp(mean of train_log_probs - old_log_probs over its tokens).

    GSPO (Zheng et al. 2025, arXiv 2507.18071), in its token form: every token of a sequence has the value s
    and the gradient of its own log-probability, s * d train_log_probs[t]. If all tokens of a sequence have the same
    weight, this adds up to the gradient of the sequence form, and no gradient has to pass through `reduce`.
    The paper clips far tighter than GRPO does: 3e-4 below and 4e-4 above.
    """
    log_ratio = masked(train_log_probs, mask) - masked(old_log_probs.detach(), mask)
    sequence = sequence_means(log_ratio, mask, sample_ids, num_sequences, reduce)[sample_ids]
    ratio = bounded(sequence + (log_ratio - log_ratio.detach())).exp()
    return surrogate_loss(
        ratio,
        masked(advantages.detach(), mask),
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
        mask=mask,
    )


def cispo_loss(
    train_log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip_high: float,
    mask: Tensor | None = None,
) -> PolicyLoss:
    """The loss -min(r, 1 + eps_clip_high) A train_log_probs, whose weight has no gradient: no token loses its gradient.

    CISPO (MiniMax-M1, 2025, arXiv 2506.13585), which bounds the ratio r only from above. `clipped` is True where r
    was above the bound.
    """
    train_log_probs, old_log_probs = masked(train_log_probs, mask), masked(old_log_probs.detach(), mask)
    ratio = bounded(train_log_probs.detach() - old_log_probs).exp()
    clipped = ratio > 1.0 + eps_clip_high
    loss = -ratio.clamp(max=1.0 + eps_clip_high) * masked(advantages.detach(), mask) * train_log_probs
    return PolicyLoss(masked(loss, mask), clipped, masked(ratio, mask))


def importance_sampling_loss(
    train_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
) -> PolicyLoss:
    """The loss -r A, never clipped; r is the trainer's probability over that with which the engine sampled the token.

    This is the policy gradient with exact importance weights of tokens; it needs no further correction (TIS).
    """
    train_log_probs, rollout_log_probs = masked(train_log_probs, mask), masked(rollout_log_probs.detach(), mask)
    ratio = bounded(train_log_probs - rollout_log_probs).exp()
    loss = masked(-ratio * masked(advantages.detach(), mask), mask)
    return PolicyLoss(loss, torch.zeros_like(loss, dtype=torch.bool), masked(ratio.detach(), mask))


def _check(estimator: str) -> None:
    if estimator not in get_args(Estimator):
        raise ValueError(f"expected --advantage-estimator of {', '.join(get_args(Estimator))}; found {estimator!r}")
