"""Tensors in buckets: what every way of sending weights to the engines cuts them into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

NamedTensor = tuple[str, torch.Tensor]


BUCKET_BYTES_ON_GPU, BUCKET_BYTES = 256 * 2**20, 32 * 2**20
"""A request a bucket costs milliseconds; larger ones on a CPU cost more, in new pages of memory on both sides."""


class ReusedBuffer:
    """Room for one bucket after the other, when the one before is no longer needed; `make(size)` gives new room."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._buffer: torch.Tensor | None = None

    def room(self, size: int) -> torch.Tensor:
        """Bytes [size]."""
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = self._make(size)
        return self._buffer[:size]


def size_of(bucket: list[NamedTensor]) -> int:
    """Bytes of all its tensors."""
    return sum(tensor.nbytes for _, tensor in bucket)


def make_buckets(named_tensors: Iterable[NamedTensor], bucket_bytes: int | None = None) -> Iterator[list[NamedTensor]]:
    """Group tensors in their order into buckets of at most `bucket_bytes`; a larger tensor gets its own.

    None: 256 MB where CUDA is, else 32 MB. ValueError for less than 1 byte, and if there is no tensor at all.
    """
    if bucket_bytes is None:
        bucket_bytes = BUCKET_BYTES_ON_GPU if torch.cuda.is_available() else BUCKET_BYTES
    if bucket_bytes < 1:
        raise ValueError(f"expected bucket_bytes of at least 1, found {bucket_bytes}")
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if not bucket:
        raise ValueError("expected weights to send, found none")
    yield bucket


def mark_last(buckets: Iterator[list[NamedTensor]]) -> Iterator[tuple[list[NamedTensor], bool]]:
    """Each bucket, and whether it is the last: that one carries the version, before it weights are neither old nor new.

    A bucket is given out once the one after it is there.
    """
    previous: list[NamedTensor] | None = None
    for bucket in buckets:
        if previous is not None:
            yield previous, False
        previous = bucket
    if previous is not None:
        yield previous, True


def flatten(bucket: list[NamedTensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes [B] of a bucket's tensors one after the other: a new tensor on their device, or `out`."""
    parts = [tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in bucket]
    if out is None:
        return torch.cat(parts)
    for part, place in zip(parts, out.split([part.numel() for part in parts]), strict=True):
        place.copy_(part)  # unlike `cat`, from a GPU to the host as well
    return out
