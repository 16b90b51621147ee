"""What `--advantage-estimator` selects: how rewards become advantages, and advantages a loss.

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

from typing import Literal, get_args

import torch
from torch import Tensor

from sleuth.algo.advantages import group_advantages, step_advantages
from sleuth.algo.losses import PolicyLoss, bounded, masked, policy_loss, surrogate_loss
from sleuth.algo.sequences import Reduce, sequence_means

Estimator = Literal[
    "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "importance_sampling"
]


def estimate_advantages(estimator: Estimator, rewards: Tensor, tokens: Tensor, *, normalize_std: bool) -> Tensor:
    """Advantages [G, n] of rewards [G, n] whose samples have `tokens` [G, n] trained tokens.

    `normalize_std` (off with --disable-grpo-std-normalization) matters to grpo, gspo and cispo alone.
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
    """The loss that belongs to an estimator; all tensors [T], this rank's part under context parallelism.

    `train_log_probs` are the trainer's now and carry the gradient, `old_log_probs` the trainer's before the step,
    `rollout_log_probs` the engine's. `sample_ids`, `num_sequences` and `reduce` (see `sleuth.algo.sequences`) are used
    by gspo alone; `reduce` must then be given if and only if sequences are spread over context-parallel ranks.
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
    """Clipped surrogate of the sequence's ratio s = exp(mean over its tokens of train_log_probs - old_log_probs).

    GSPO (Zheng et al. 2025, arXiv 2507.18071), in its token form: every token of a sequence has the value s
    and the gradient of its own log-probability, s * d train_log_probs[t]. With one weight for all of a sequence's
    tokens that adds up to the gradient of the sequence form, without a gradient through `reduce`.
    The paper clips far tighter than GRPO: 3e-4 and 4e-4.
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
    """-min(r, 1 + eps_clip_high) A train_log_probs, the weight without gradient: no token loses its gradient.

    CISPO (MiniMax-M1, 2025, arXiv 2506.13585), which bounds the ratio r only from above. `clipped` says where
    the bound held.
    """
    train_log_probs, old_log_probs = masked(train_log_probs, mask), masked(old_log_probs.detach(), mask)
    ratio = bounded(train_log_probs.detach() - old_log_probs).exp()
    clipped = ratio > 1.0 + eps_clip_high
    loss = -ratio.clamp(max=1.0 + eps_clip_high) * masked(advantages.detach(), mask) * train_log_probs
    return PolicyLoss(masked(loss, mask), clipped, masked(ratio, mask))


def importance_sampling_loss(
    train_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None
) -> PolicyLoss:
    """-r A with r the ratio to the probability at which a token was sampled, by whichever engine; never clipped.

    The policy gradient with exact token-level importance weights; it needs no further correction (TIS).
    """
    train_log_probs, rollout_log_probs = masked(train_log_probs, mask), masked(rollout_log_probs.detach(), mask)
    ratio = bounded(train_log_probs - rollout_log_probs).exp()
    loss = masked(-ratio * masked(advantages.detach(), mask), mask)
    return PolicyLoss(loss, torch.zeros_like(loss, dtype=torch.bool), masked(ratio.detach(), mask))


def _check(estimator: str) -> None:
    if estimator not in get_args(Estimator):
        raise ValueError(f"expected --advantage-estimator of {', '.join(get_args(Estimator))}; found {estimator!r}")
