"""Tensors in buckets: what every way of sending weights to the engines cuts them into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

DEFAULT_BUCKET_BYTES = 256 * 2**20

NamedTensor = tuple[str, torch.Tensor]


def make_buckets(named_tensors: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Group tensors in their order into buckets of at most `bucket_bytes`; a larger tensor gets its own.

    ValueError for less than 1 byte, and if there is no tensor at all.
    """
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


def flatten(bucket: list[NamedTensor]) -> torch.Tensor:
    """The bytes [B] of a bucket's tensors one after the other, on their device: always a new tensor."""
    return torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in bucket])


def expect_names(named_tensors: Iterable[NamedTensor], names: Iterable[str]) -> Iterator[NamedTensor]:
    """Pass the tensors on; ValueError unless each of `names` came once and nothing else did.

    An engine leaves out in silence what it has no place for, and keeps what it was not sent.
    """
    missing = set(names)
    for name, tensor in named_tensors:
        if name not in missing:
            raise ValueError(f"expected each weight of the model once, found {name}, which is none or came before")
        missing.remove(name)
        yield name, tensor
    if missing:
        raise ValueError(f"expected every weight of the model, {len(missing)} did not come: {sorted(missing)[:5]}")
