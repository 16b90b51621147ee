"""Finds weights that are NaN or infinite, without waiting for the device at each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sleuth.megatron.model import PolicyModel

NAMED = 4
"""So many tensors are named in a message."""


def not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of tensors that hold NaN or an infinity; one fused reduction and one wait for the device."""
    held = [(name, tensor.detach()) for name, tensor in named if tensor.numel()]
    if not held:
        return []
    largest = torch._foreach_norm([tensor for _, tensor in held], float("inf"))  # unlike a sum, it cannot overflow
    finite = torch.isfinite(torch.stack([value.float() for value in largest])).tolist()
    return [name for (name, _), fine in zip(held, finite, strict=True) if not fine]


def ruined_weights(chunks: Sequence[PolicyModel]) -> str | None:
    """Which weights of any rank are not finite, in words; None if all are. Collective: the same on all ranks."""
    names = [name for chunk in chunks for name in not_finite(chunk.named_parameters())]
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, names)
    ruined = sorted(set().union(*found))
    return describe(ruined) if ruined else None


def describe(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"NaN or infinite values in {', '.join(names[:NAMED])}{more}"
