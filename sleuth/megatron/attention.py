"""Packed self-attention over torch's scaled dot product, with zigzag context parallelism.

It is the core attention of the layer spec where TransformerEngine is not installed (megatron's own refuses
packed sequences and context parallelism). Device-neutral.

Layout: a micro-batch is one row of sequences laid end to end ("thd": tokens, heads, head dimension). Under
context parallelism rank r of C holds, of every sequence, the chunks r and 2C-1-r of 2C equal ones, so that the
causal work is equal on all ranks; keys and values are gathered, queries stay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from sleuth.algo.context_parallel import zigzag_inverse

# Sequences are padded and attended to together while padding adds at most this fraction of tokens.
_MAX_PADDING = 0.25


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a packed row.

    `forward(query, key, value, ...)`: query [t, heads, d], key and value [t, kv heads, d], this rank's share of
    the row; returns [t, heads * d].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0.0:
            raise ValueError(f"--attention-dropout {dropout} needs TransformerEngine; without it use 0")
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), attn_mask_type
        group = getattr(pg_collection, "cp", None)
        self.group = parallel_state.get_context_parallel_group() if group is None else group
        self.size, self.rank = self.group.size(), self.group.rank()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None, "only packed rows are supported"
        bounds = packed_seq_params.cu_seqlens_q_padded
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        if self.size == 1:
            return self._packed(query, key, value, lengths)
        return self._context_parallel(query, key, value, lengths)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        """All sequences are whole here: those of similar length make a padded batch. Causality hides the padding."""
        batches = _padded_batches(tuple(lengths))
        if len(batches) == 1 and batches[0].full:
            shape = batches[0].shape
            return self._attend(*(x.unflatten(0, shape) for x in (query, key, value))).flatten(0, 1).flatten(1)
        out = []
        for batch in batches:
            padded = (_Pad.apply(x, batch).unflatten(0, batch.shape) for x in (query, key, value))
            out.append(_Unpad.apply(self._attend(*padded).flatten(0, 1).flatten(1), batch))
        order = torch.cat([batch.tokens for batch in batches]).to(query.device)
        return torch.cat(out).index_select(0, torch.argsort(order))

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        """Each rank attends with its two chunks of every sequence to all keys before them."""
        gathered = self._gather(torch.stack([key, value], 1), lengths)
        pieces, start_q, start_k = [], 0, 0
        for length in lengths:
            chunk = length // (2 * self.size)
            for position in (self.rank, 2 * self.size - 1 - self.rank):
                keys = gathered[None, start_k : start_k + (position + 1) * chunk]
                pieces.append(self._attend(query[None, start_q : start_q + chunk], keys[:, :, 0], keys[:, :, 1])[0])
                start_q += chunk
            start_k += length
        return torch.cat(pieces).flatten(1)

    def _gather(self, x: Tensor, lengths: list[int]) -> Tensor:
        """[t / C, ...] of every rank -> [t, ...] in sequence order; the backward pass is a reduce-scatter."""
        full = gather_from_sequence_parallel_region(x.contiguous(), tensor_parallel_output_grad=True, group=self.group)
        return full.index_select(0, zigzag_inverse(lengths, self.size).to(x.device))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, s, heads, d] and [b, s', kv heads, d], s' >= s: the last query sees all keys. Returns like `query`."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        groups = query.shape[1] != key.shape[1]
        square = query.shape[2] == key.shape[2]
        mask = None if square else _lower_right_mask(query, key)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=square, scale=self.scale, enable_gqa=groups
        )
        return out.transpose(1, 2)


def _lower_right_mask(query: Tensor, key: Tensor) -> Tensor:
    """The causal mask aligned to the last query and key; on CUDA as a bias that flash attention understands."""
    if query.is_cuda:
        return causal_lower_right(query.shape[2], key.shape[2])
    ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    return ones.tril(key.shape[2] - query.shape[2])


@dataclass(frozen=True, slots=True)
class _PaddedBatch:
    """Some sequences of a row as a padded batch of `shape` (sequences, longest).

    Token `tokens[i]` of the row stands at place `places[i]` of the flattened batch; `full`: without padding.
    """

    shape: tuple[int, int]
    tokens: Tensor
    places: Tensor
    full: bool


class _Pad(torch.autograd.Function):
    """Row [t, ...] -> flattened padded batch [b * s, ...], zeros at padding. Autograd's own way through slices
    would make and add up a whole row of zeros for every sequence."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, batch: _PaddedBatch) -> Tensor:
        ctx.batch, ctx.total = batch, len(row)
        return _move(row, batch.tokens, batch.places, batch.shape[0] * batch.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _move(grad, ctx.batch.places, ctx.batch.tokens, ctx.total), None


class _Unpad(torch.autograd.Function):
    """Flattened padded batch [b * s, ...] -> its tokens in the order of `batch.tokens`."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, batch: _PaddedBatch) -> Tensor:
        ctx.batch = batch
        return padded.index_select(0, batch.places.to(padded.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        batch = ctx.batch
        return _move(grad, torch.arange(len(grad)), batch.places, batch.shape[0] * batch.shape[1]), None


def _move(source: Tensor, origins: Tensor, destinations: Tensor, size: int) -> Tensor:
    """A new tensor of `size` rows whose `destinations` hold the `origins` of `source`, zeros elsewhere."""
    out = source.new_zeros(size, *source.shape[1:])
    return out.index_copy_(0, destinations.to(source.device), source.index_select(0, origins.to(source.device)))


@functools.lru_cache(maxsize=64)
def _padded_batches(lengths: tuple[int, ...]) -> list[_PaddedBatch]:
    """The padded batches of a row; every layer of the model asks for the same."""
    starts = [0, *accumulate(lengths)]
    batches = []
    for indices in _similar_lengths(lengths):
        longest = max(lengths[i] for i in indices)
        tokens = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in indices])
        places = torch.cat([torch.arange(lengths[i]) + row * longest for row, i in enumerate(indices)])
        shape = (len(indices), longest)
        batches.append(_PaddedBatch(shape, tokens, places, len(tokens) == shape[0] * shape[1]))
    return batches


def _similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group indices by length so that padding a group to its longest adds at most `_MAX_PADDING`."""
    groups: list[list[int]] = []
    total = longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded > (total + lengths[index]) * (1 + _MAX_PADDING):
            groups.append([])
            total, longest = 0, lengths[index]
        groups[-1].append(index)
        total += lengths[index]
    return groups
