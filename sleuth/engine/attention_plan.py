"""Which requests the engine's attention on a CPU computes together. Pure: no SGLang.

A batch is a rectangle: queries of several requests, each with all keys of its own request, padded to the longest. So
requests of similar length belong together, and a few in one batch are worth some padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PADDING = 0.5
"""Padding of a batch as a share of what is needed; beyond it, shorter requests get a batch of their own."""
FREE_KEYS, FREE_PAIRS = 2**11, 2**15
"""Padding that costs less than a further batch: keys that are fetched, pairs of a query and a key."""
MOST_PAIRS = 2**22
"""Pairs in a batch: its mask holds a number for each."""


class Piece(NamedTuple):
    """New tokens of one request that follow each other. The last of them sees `keys` keys, the one before one less."""

    request: int
    start: int
    """Where its first token is, among the new tokens of all requests."""
    queries: int
    keys: int


def cut(new: Sequence[int], total: Sequence[int]) -> list[Piece]:
    """The pieces of requests with `new` tokens each, at the end of `total`; longer requests are cut to MOST_PAIRS."""
    pieces, start = [], 0
    for request, (queries, keys) in enumerate(zip(new, total, strict=True)):
        most = max(1, MOST_PAIRS // max(1, keys))
        for first in range(0, queries, most):
            count = min(most, queries - first)
            pieces.append(Piece(request, start + first, count, keys - queries + first + count))
        start += queries
    return pieces


def join(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces in batches with little padding."""
    batches: list[list[Piece]] = []
    longest = keys = pairs = 0
    for piece in sorted(pieces, key=_size, reverse=True):
        longest, keys = max(longest, piece.keys), keys + piece.keys
        pairs += piece.queries * piece.keys
        if batches and _fits(len(batches[-1]) + 1, batches[-1][0].queries, longest, keys, pairs):
            batches[-1].append(piece)
        else:
            batches.append([piece])
            longest, keys, pairs = piece.keys, piece.keys, piece.queries * piece.keys
    return batches


def _size(piece: Piece) -> tuple[int, int]:
    return piece.queries, piece.keys


def _fits(count: int, queries: int, longest: int, keys: int, pairs: int) -> bool:
    """Whether `count` pieces that need so many keys and pairs fill a rectangle of `queries` and `longest` keys well."""
    all_keys = count * longest
    all_pairs = all_keys * queries
    return (
        all_pairs <= MOST_PAIRS
        and all_keys - keys <= max(FREE_KEYS, PADDING * keys)
        and all_pairs - pairs <= max(FREE_PAIRS, PADDING * pairs)
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """The indices of `b` pieces, padded to `e` queries and `s` keys. Padding repeats the last query and key."""

    queries: Tensor
    """[b * e] Positions among the new tokens of all requests."""
    slots: Tensor
    """[b * s] Slots of the key-value cache."""
    mask: Tensor
    """[b, 1, e, s] 0 where a query sees a key, else -inf."""
    real: Tensor | None
    """[n] Which of the b * e queries are no padding; None if all are."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], slots: Tensor, requests: Tensor, dtype: torch.dtype) -> Batch:
        """`slots` [rows, longest]: the slots of the tokens of each row's request; `requests` [B]: their rows."""
        request, start, queries, keys = torch.tensor(pieces).T[:, :, None]
        query, key = torch.arange(int(queries.max())), torch.arange(int(keys.max()))
        where = requests[request].long() * slots.stride(0) + key.minimum(keys - 1)
        hidden = key > (keys - queries + query)[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        padded = bool((queries != len(query)).any())
        return cls(
            (start + query.minimum(queries - 1)).flatten(),
            torch.take(slots, where).flatten().long(),
            mask[:, None],
            (query < queries).flatten().nonzero().squeeze(1) if padded else None,
        )
