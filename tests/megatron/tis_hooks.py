"""Importance-sampling hooks for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

REJECTED_BELOW = -4.8


def truncate(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """What --use-tis does without a hook."""
    assert response_lengths == [len(mask) for mask in loss_masks]
    assert all(total > response for total, response in zip(total_lengths, response_lengths, strict=True))
    weights = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp().clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weights, loss_masks, {"weight": weights, "constant": 3.0}


def reject_and_normalise(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """Weights with mean 1 over the whole step, and no token whose ratio is above 1.5."""
    ratios = [(a - b).exp() for a, b in zip(train_log_probs, rollout_log_probs, strict=True)]
    masks = [mask * (ratio <= 1.5) for mask, ratio in zip(loss_masks, ratios, strict=True)]
    ratio, mask = torch.cat(ratios), torch.cat(masks)
    total, count = kwargs["reduce"](torch.stack([(ratio * mask).sum(), mask.sum()]))
    return pg_loss * ratio * count / total, masks, {"step_mean": float(total / count)}


def reject(
    args: Any,
    *,
    pg_loss: Tensor,
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """No weights; no token that the engine found less likely than REJECTED_BELOW nats."""
    masks = [mask * (rollout >= REJECTED_BELOW) for mask, rollout in zip(loss_masks, rollout_log_probs, strict=True)]
    return pg_loss, masks, {}
