"""Packed self-attention by torch's kernels, with zigzag context parallelism.

The layer spec uses it as core attention where TransformerEngine is not installed (megatron's own refuses
packed sequences and context parallelism). It runs on any device: on CUDA by one kernel for a whole row
(`torch.nn.attention.varlen`), elsewhere by a scaled dot product for each sequence.

Layout: a micro-batch is one row of sequences laid end to end ("thd": tokens, heads, head dimension). Under
context parallelism every sequence is cut into 2C equal chunks, and rank r of C holds chunks r and 2C-1-r, so that
all ranks have equal causal work. Keys and values are gathered on all ranks; queries stay where they are.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

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

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10, with which no run is made, but the check of one GPU
    varlen_attn = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from sleuth.arguments.hf_config import Llama3Scaling


class Pieces(NamedTuple):
    """Stretches of a row whose queries attend to the keys of their sequence up to the last of them.

    Without context parallelism they are the sequences, else the two chunks of each that this rank holds. `query_bounds`
    and `key_bounds` are int32 [pieces + 1]; `keys` says which of the gathered keys they are, one piece after the other
    (None: those that are here, in order); `longest_query` and `longest_key` are in tokens.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int
    keys: Tensor | None = None


@dataclass
class PackedRow(PackedSeqParams):
    """What every layer needs of a row, worked out once a forward pass: a layer must not wait for the device.

    `lengths` of its sequences, padded; under context parallelism `order` [T], which puts gathered tokens into the
    sequences' order; by how much this rank's tokens are rotated (`rotary_angles`; None: not at all); `pieces` for
    torch's attention over rows.
    """

    lengths: Sequence[int] = ()
    order: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    pieces: Pieces | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], bounds: Tensor, context_parallel_size: int, rank: int = 0) -> PackedRow:
        """A row of sequences of these lengths, which begin at `bounds`, on the device of `bounds`.

        `rank` is the one among the context-parallel ranks that shares it.
        """
        longest = max(lengths)
        order = None
        pieces = Pieces(bounds, bounds, longest, longest)
        if context_parallel_size > 1:
            order = zigzag_inverse(list(lengths), context_parallel_size)
            pieces = _chunk_pieces(lengths, order, context_parallel_size, rank, bounds.device)
            order = order.to(bounds.device)
        return cls(
            qkv_format="thd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            lengths=lengths,
            order=order,
            pieces=pieces,
        )


def _chunk_pieces(lengths: Sequence[int], order: Tensor, size: int, rank: int, where: torch.device) -> Pieces:
    """Pieces of a rank under context parallelism; `order` [T] puts gathered tokens into the sequences' order."""
    starts, queries, seen = zip(*_chunks(lengths, size, rank), strict=True)
    keys = torch.cat([order[start : start + count] for start, count in zip(starts, seen, strict=True)])
    query_bounds, key_bounds = (torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (queries, seen))
    return Pieces(query_bounds.to(where), key_bounds.to(where), max(queries), max(seen), keys.to(where))


def _chunks(lengths: Sequence[int], size: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """(start of its sequence, tokens, tokens up to its end) of each of a rank's chunks, in the rank's order."""
    start = 0
    for length in lengths:
        chunk = length // (2 * size)
        for position in (rank, 2 * size - 1 - rank):
            yield start, chunk, (position + 1) * chunk
        start += length


def takes_rows(query: Tensor) -> bool:
    """Whether torch's kernel for whole rows takes this query [t, heads, d]; else there is a call for each sequence.

    The one place that decides. The kernel is flash attention, for bfloat16 on GPUs from Ampere on.
    """
    if not query.is_cuda or query.dtype != torch.bfloat16 or not _kernel_knows_groups():
        return False
    width = query.shape[-1]
    return width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(query.device)[0] >= 8


@functools.cache
def _kernel_knows_groups() -> bool:
    """Whether torch's kernel is there, and takes fewer heads of keys than of queries (torch 2.13 does)."""
    return varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters


def rotary_frequencies(
    width: int, base: float, scaling: Llama3Scaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Radians per position [width / 2], float32, of rotary position embeddings (Su et al. 2021, arXiv 2104.09864).

    With `scaling`, as in Llama 3.1: wavelengths longer than the context of training are stretched by its factor, short
    ones stay, and those in between are blended.
    """
    plain = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # within the context of training
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


def rotary_angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [t, 1, width / 2] of the rotation at positions [t].

    They are computed once for a forward pass; megatron's own rotation computes them in every layer, twice.
    """
    angles = (positions[:, None] * frequencies)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a packed row, with rotary position embeddings.

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
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None, "only packed rows are supported"
        if packed_seq_params.rotary is not None:
            query, key = (_Rotate.apply(x, *packed_seq_params.rotary) for x in (query, key))
        if takes_rows(query):
            return self._whole_row(query, key, value, packed_seq_params)
        if self.size == 1:
            return self._packed(query, key, value, list(packed_seq_params.lengths))
        return self._context_parallel(query, key, value, packed_seq_params)

    def _whole_row(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        """All pieces of the row in one call, which takes their bounds from the device.

        Under context parallelism the keys that two pieces of a sequence both see are there twice, which is at most
        one and a half times the sequence.
        """
        pieces = row.pieces
        assert pieces is not None
        if pieces.keys is not None:
            gathered = self._gather(torch.stack([key, value], 1), pieces.keys)
            key, value = gathered.unbind(1)
        out: Tensor = varlen_attn(  # type: ignore[assignment]  # a pair if asked for more
            query,
            key,
            value,
            pieces.query_bounds,
            pieces.key_bounds,
            pieces.longest_query,
            pieces.longest_key,
            scale=self.scale,
            window_size=(-1, 0),  # causal: the last query of a piece sees its last key
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.flatten(1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        """Attention where this rank holds all sequences whole.

        The row is split, not sliced: autograd joins the gradients of a split at once, but adds up those of slices.
        """
        parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend(q[None], k[None], v[None])[0] for q, k, v in parts]).flatten(1)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        """Each rank attends with its two chunks of every sequence to all keys before them."""
        assert row.order is not None
        gathered = self._gather(torch.stack([key, value], 1), row.order)
        pieces, at = [], 0
        for start, count, seen in _chunks(row.lengths, self.size, self.rank):
            keys = gathered[None, start : start + seen]
            pieces.append(self._attend(query[None, at : at + count], keys[:, :, 0], keys[:, :, 1])[0])
            at += count
        return torch.cat(pieces).flatten(1)

    def _gather(self, x: Tensor, order: Tensor) -> Tensor:
        """[t / C, ...] of every rank -> [t, ...] in sequence order; the backward pass is a reduce-scatter."""
        full = gather_from_sequence_parallel_region(x.contiguous(), tensor_parallel_output_grad=True, group=self.group)
        return full.index_select(0, order)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of query [b, s, heads, d] to key and value [b, s', kv heads, d], in the shape of `query`.

        s' >= s: the last query sees all keys.
        """
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        groups = query.shape[1] != key.shape[1]
        square = query.shape[2] == key.shape[2]
        mask = None if square else _lower_right_mask(query, key)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=square, scale=self.scale, enable_gqa=groups
        )
        return out.transpose(1, 2)


def _lower_right_mask(query: Tensor, key: Tensor) -> Tensor:
    """The causal mask, aligned so that the last query sees the last key; on CUDA a bias that flash attention takes."""
    if query.is_cuda:
        return causal_lower_right(query.shape[2], key.shape[2])
    ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    return ones.tril(key.shape[2] - query.shape[2])


class _Rotate(torch.autograd.Function):
    """Rotate pairs (i, i + d / 2) of x [t, heads, d] by angles of which cos and sin [t, 1, d / 2] are given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (a, b), (out_a, out_b) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out
