"""Per-token losses of the policy: clipped surrogate, KL to a reference, importance weights.

All functions are elementwise over packed tokens [T]; log-probabilities are in nats. `sleuth.algo.optimizer_steps`
decides the weights of tokens in the loss of a step; `weighted_sum` here only adds up.

Where a `mask` [T] is zero, entries are replaced *before* any arithmetic, instead of multiplied by zero
after it: NaN or infinity there reaches neither a loss nor a gradient.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from sleuth.algo.names import KLKind

MAX_EXPONENT = 20.0
"""Log ratios are bounded to [-20, 20] nats before `exp`, so that no ratio overflows float32."""
MAX_LOW_VAR_KL = 10.0
"""`low_var_kl` is bounded to this many nats a token; beyond it the gradient is zero."""


class PolicyLoss(NamedTuple):
    """The results of a policy loss for each token: all [T], and zero (False) at masked tokens.

    loss: to be minimised; it carries the gradient. clipped: True where a bound set the gradient to zero, or
    lowered it (CISPO). ratio: new over old probability, without gradient.
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor


def policy_loss(
    train_log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
    mask: Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate: -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A).

    The ratio r = exp(train_log_probs - old_log_probs) compares the policy now with the policy before the step.
    From PPO (Schulman et al. 2017, arXiv 1707.06347), with the higher upper bound of DAPO (Yu et al. 2025,
    arXiv 2503.14476). With `eps_clip_c` > 1 the loss of a token with A < 0 is at most -c A ("dual
    clip", Ye et al. 2020, arXiv 1912.09729). Only `train_log_probs` gets a gradient.
    """
    train_log_probs, old_log_probs, advantages = _select(
        mask, train_log_probs, old_log_probs.detach(), advantages.detach()
    )
    return surrogate_loss(
        bounded(train_log_probs - old_log_probs).exp(),
        advantages,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
        mask=mask,
    )


def surrogate_loss(
    ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
    mask: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate (see `policy_loss`) of a ratio [T], which carries the gradient."""
    if eps_clip_c is not None and eps_clip_c <= 1.0:
        raise ValueError(
            f"expected eps_clip_c > 1 (a bound on the ratio where the advantage is < 0), found {eps_clip_c}"
        )
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if eps_clip_c is not None:
        ceiling = -eps_clip_c * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(over, ceiling, loss), clipped | over
    return _policy_loss(loss, clipped, ratio, mask)


def kl_estimate(policy_log_probs: Tensor, ref_log_probs: Tensor, kind: KLKind, *, mask: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, in nats: [T].

    With d = policy_log_probs - ref_log_probs (Schulman, "Approximating KL divergence", 2020):
    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, unbiased and never negative.
    `low_var_kl` is k3 bounded to at most 10 nats, with zero gradient beyond, so that one token which
    the reference finds nearly impossible cannot dominate the step. In k3 and low_var_kl, d is
    first bounded to [-20, 20]. Only `policy_log_probs` gets a gradient.
    """
    if kind not in get_args(KLKind):
        raise ValueError(f"expected a KL estimator of {', '.join(get_args(KLKind))}; found {kind!r}")
    policy_log_probs, ref_log_probs = _select(mask, policy_log_probs, ref_log_probs.detach())
    difference = policy_log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    difference = bounded(difference)
    # For a tiny difference, exp(-d) - 1 would lose digits and the estimate could fall below zero; expm1 does not.
    k3 = torch.expm1(-difference) + difference
    return k3.clamp(max=MAX_LOW_VAR_KL) if kind == "low_var_kl" else k3


def truncated_importance_weights(
    train_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float, *, mask: Tensor | None = None
) -> Tensor:
    """Importance weights clip(p_train / p_rollout, low, high) [T], without gradient; 0 at masked tokens.

    They correct for an engine whose probabilities differ slightly from the trainer's
    (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    """
    if not 0.0 <= low <= high:
        raise ValueError(f"expected 0 <= low <= high for importance weights, found low={low}, high={high}")
    train, rollout = _select(mask, train_log_probs.detach(), rollout_log_probs.detach())
    return masked(bounded(train - rollout).exp().clamp(low, high), mask)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """The sum of values [T] times weights [T]; a value whose weight is zero is ignored, even NaN."""
    return (masked(values, weights) * weights).sum()


def masked(values: Tensor, mask: Tensor | None, fill: float = 0.0) -> Tensor:
    """`values` [T] with `fill` where `mask` [T] is zero; the gradient is zero there, too."""
    return values if mask is None else values.masked_fill(mask == 0, fill)


def bounded(log_ratio: Tensor) -> Tensor:
    """`log_ratio` clamped to [-20, 20] nats, so that its exponential is finite; the gradient is zero outside."""
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT)


def _select(mask: Tensor | None, *values: Tensor) -> tuple[Tensor, ...]:
    return tuple(masked(value, mask) for value in values)


def _policy_loss(loss: Tensor, clipped: Tensor, ratio: Tensor, mask: Tensor | None) -> PolicyLoss:
    clipped = clipped if mask is None else clipped & (mask != 0)
    return PolicyLoss(masked(loss, mask), clipped, masked(ratio.detach(), mask))
