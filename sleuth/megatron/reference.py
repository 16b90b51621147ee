"""The frozen reference: weights in host memory that replace those of the policy while they score tokens.

One model on the device serves both. On a GPU the copies are pinned, so that a swap is as fast as the bus allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Reference:
    """A copy of the weights that the model, in one or several `chunks`, has at this moment."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._frozen, self._policy = self._host_buffers(), self._host_buffers()
        self._read(self._frozen)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the model has the reference's weights; afterwards it has its own again."""
        self._read(self._policy)
        self._write(self._frozen)
        try:
            yield
        finally:
            self._write(self._policy)

    def _host_buffers(self) -> list[Tensor]:
        pin = torch.cuda.is_available()
        return [torch.empty_like(p, device="cpu", pin_memory=pin, requires_grad=False) for p in self._parameters]

    @torch.no_grad()
    def _read(self, buffers: list[Tensor]) -> None:
        for buffer, parameter in zip(buffers, self._parameters, strict=True):
            buffer.copy_(parameter, non_blocking=True)

    @torch.no_grad()
    def _write(self, buffers: list[Tensor]) -> None:
        for buffer, parameter in zip(buffers, self._parameters, strict=True):
            parameter.copy_(buffer, non_blocking=True)
