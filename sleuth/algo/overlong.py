"""A penalty in the reward for responses that are nearly too long."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Penalties [...], between -factor and 0, to add to the rewards of responses of `lengths` [...] tokens.

    A penalty is 0 up to max_length - buffer tokens and falls linearly to -factor at max_length and beyond: the "soft
    overlong punishment" of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13).
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"expected 0 < buffer <= max_length = {max_length} tokens, found a buffer of {buffer}")
    if factor < 0:
        raise ValueError(f"expected a factor >= 0 (the largest penalty), found {factor}")
    return factor * ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)
