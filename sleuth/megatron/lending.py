"""The trainer's device memory, lent while engines generate on the same GPU, and taken back before it is needed.

    memory = LentMemory(ddp_chunks, optimizer)
    memory.lend(PARTS)              # weights and optimizer state go to the host, gradients are dropped
    memory.take_back(PARTS)         # everything is as before, bit for bit, but for the gradients
    memory.wait()                   # the optimizer's state came back beside other work: it is there now

It works on storages, not on tensors: a storage is emptied and filled again, and every view of it (parameters within
megatron's buffers, shards of the optimizer) stays what it was. So it makes no difference whether the optimizer is
distributed, which layout the model has, or whose Adam it is. The reference's weights are not its business: they live
in host memory all the time (`sleuth.megatron.reference`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from sleuth.megatron.optimizer import PolicyOptimizer

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
PIECE_BYTES = 2**28
"""Pinned memory is given in powers of two: in whole pieces, and not a tensor at a time, none is wasted."""


@dataclass
class _Lent:
    """One part, and whether it is away: then a tensor of each of its storages, their sizes in bytes, and the copy."""

    away: bool = False
    tensors: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    host: list[Tensor] = field(default_factory=list)


class LentMemory:
    """Lends the memory of one rank's `chunks` and their `optimizer`.

    The gradients' content is lost: every optimizer step begins by setting them to zero. Host memory is kept from one
    time to the next, pinned where there is CUDA.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: PolicyOptimizer) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._parts: dict[Part, _Lent] = {part: _Lent() for part in PARTS}
        self._arrived: Any = None  # a CUDA event
        self._stream: Any = None

    @torch.no_grad()
    def lend(self, parts: Iterable[Part] = PARTS) -> None:
        """Free the device's memory of `parts`; those that are away stay so."""
        self.wait()
        parallel_state.get_global_memory_buffer().buffer.clear()  # what sequence parallelism gathers into
        leaving = {part: self._tensors(part) for part in parts if not self._parts[part].away}
        for part, tensors in leaving.items():
            if part != "gradients":
                _to_host(tensors, self._parts[part].host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies run on their own
        for part, tensors in leaving.items():
            lent = self._parts[part]
            lent.away, lent.tensors, lent.sizes = True, tensors, [_size(tensor) for tensor in tensors]
            for tensor in tensors:
                tensor.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def take_back(self, parts: Iterable[Part] = PARTS) -> None:
        """Bring `parts` back; those that are here stay so. The optimizer's state may be used after `wait`.

        It travels while the weights, which come first, are already in use.
        """
        for part in sorted((part for part in parts if self._parts[part].away), key=PARTS.index):
            lent = self._parts[part]
            for tensor, size in zip(lent.tensors, lent.sizes, strict=True):
                tensor.untyped_storage().resize_(size)
            if part == "optimizer" and torch.cuda.is_available():
                self._fill_beside(lent)
            elif part != "gradients":
                _from_host(lent.tensors, lent.host)
            lent.away, lent.tensors, lent.sizes = False, [], []

    def wait(self) -> None:
        """Let the device wait, not the host, for what `take_back` brings beside other work."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
            self._arrived = None

    def held(self) -> dict[Part, int]:
        """Bytes of each part that lie on the device now; 0 for what is lent."""
        return {part: 0 if self._parts[part].away else sum(map(_size, self._tensors(part))) for part in PARTS}

    def _fill_beside(self, lent: _Lent) -> None:
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # whoever had the memory before is done with it
        with torch.cuda.stream(self._stream):
            _from_host(lent.tensors, lent.host)
            self._arrived = torch.cuda.Event()
            self._arrived.record(self._stream)

    def _tensors(self, part: Part) -> list[Tensor]:
        """One tensor of each storage of `part`. What plain float32 training has both as weight and as the
        optimizer's parameter is a weight."""
        weights = _storages(parameter for chunk in self._chunks for parameter in chunk.parameters())
        if part == "weights":
            return list(weights.values())
        if part == "gradients":
            return list(_storages(_gradient_buffers(self._chunks)).values())
        return [tensor for key, tensor in _storages(self._optimizer.tensors()).items() if key not in weights]


def _gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def _storages(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """By storage, the first tensor that lies in it; those that lie in none are left out."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        if _size(tensor):
            found.setdefault(tensor.untyped_storage()._cdata, tensor.detach())
    return found


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _bytes(tensor: Tensor) -> Tensor:
    """The whole storage that `tensor` lies in, as uint8."""
    count = _size(tensor) // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0).view(torch.uint8)


def _to_host(tensors: Sequence[Tensor], host: list[Tensor]) -> None:
    """Copy the storages, one behind the other, into `host`, which grows to what it takes."""
    total = sum(map(_size, tensors))
    if sum(piece.numel() for piece in host) < total:
        sizes = (min(PIECE_BYTES, total - start) for start in range(0, total, PIECE_BYTES))
        host[:] = [torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for size in sizes]
    for tensor, place in _portions(tensors, host):
        place.copy_(tensor, non_blocking=True)


def _from_host(tensors: Sequence[Tensor], host: list[Tensor]) -> None:
    for tensor, place in _portions(tensors, host):
        tensor.copy_(place, non_blocking=True)


def _portions(tensors: Sequence[Tensor], host: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """(part of a storage, its place in `host`), in order; none reaches over the end of a piece."""
    at = 0
    for row in map(_bytes, tensors):
        start = 0
        while start < row.numel():
            number, offset = divmod(at, PIECE_BYTES)
            size = min(row.numel() - start, PIECE_BYTES - offset)
            yield row[start : start + size], host[number][offset : offset + size]
            start, at = start + size, at + size
