"""Attention of packed sequences, forward and backward, against softmax written out in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from sleuth.megatron import attention as trainer_attention
from sleuth.megatron import parallel
from sleuth.megatron.attention import PackedAttention, PackedRow, takes_rows
from sleuth.megatron.model import plain_config
from tools.gpu_checks.results import Result, judged, needs_cuda
from tools.gpu_checks.trainer import SMALL

LENGTHS = (1, 5, 128, 129, 700)
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 2e-2)}
"""|difference| / |expected| of the output, and of the gradients of queries, keys and values."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query [t, heads, d], key and value [t, kv heads, d] -> [t, heads * d]."""


ROWS = "attention by rows, bfloat16"


def check(device: str, name: str) -> Iterator[Result]:
    """The trainer's attention, a call for each sequence, and where torch has the kernel one for the whole row."""
    with parallel.alone():
        for dtype in TOLERANCES:
            with by_sequence():
                yield compare(f"attention, {_name(dtype)}", packed_attention(dtype, device), dtype, device)
        if takes_rows(torch.empty(1, 1, SMALL.kv_channels, dtype=torch.bfloat16, device=device)):
            yield compare(ROWS, packed_attention(torch.bfloat16, device), torch.bfloat16, device)
        elif device == "cuda":
            yield Result(ROWS, "skipped", f"torch {torch.__version__} has no kernel for this GPU")
        else:
            yield needs_cuda(ROWS)


@contextmanager
def by_sequence() -> Iterator[None]:
    """Within, no kernel takes whole rows."""
    usual = trainer_attention.takes_rows
    trainer_attention.takes_rows = lambda query: False
    try:
        yield
    finally:
        trainer_attention.takes_rows = usual


def packed_attention(dtype: torch.dtype, device: str) -> Attention:
    """The trainer's own."""
    module = PackedAttention(plain_config(SMALL, dtype), 1, AttnMaskType.causal)
    row = PackedRow.of(LENGTHS, bounds(device), 1)
    return lambda query, key, value: module(query, key, value, packed_seq_params=row)


def compare(name: str, attention: Attention, dtype: torch.dtype, device: str) -> Result:
    found = with_gradients(attention, dtype, device)
    expected = with_gradients(plain_attention, torch.float32, device)
    forward, backward = TOLERANCES[dtype]
    apart = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    return judged(name, {"output": (apart[0], forward), "gradients": (max(apart[1:]), backward)})


def with_gradients(attention: Attention, dtype: torch.dtype, device: str) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    heads = (SMALL.num_attention_heads, SMALL.num_query_groups, SMALL.num_query_groups)
    rows = [torch.randn(sum(LENGTHS), h, SMALL.kv_channels, generator=generator).bfloat16() for h in heads]
    inputs = [row.to(device, dtype).requires_grad_() for row in rows]
    out = attention(*inputs)
    out.backward(torch.randn(out.shape, generator=generator).bfloat16().to(device, dtype))
    return [out.detach(), *(row.grad for row in inputs if row.grad is not None)]


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(q k / sqrt(d)) v of each sequence, causal."""
    repeats = query.shape[1] // key.shape[1]
    outs = []
    for q, k, v in zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True):
        keys, values = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[-1] ** 0.5
        future = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), values))
    return torch.cat(outs).flatten(1)


def bounds(device: str, lengths: Sequence[int] = LENGTHS) -> Tensor:
    """Where each sequence begins, and where the last one ends: int32 [sequences + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
