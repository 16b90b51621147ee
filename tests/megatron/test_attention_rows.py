"""Attention over whole rows, as on CUDA: what torch's kernel is given says the same as one call for each sequence.

The kernel stands in here as a loop over the bounds that it is given; on CUDA, with context parallelism too, it is
traced in `tests/fake_cuda`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

import sleuth.megatron.attention as attention_module
from sleuth.algo.context_parallel import zigzag_index
from sleuth.megatron.attention import PackedAttention, PackedRow, takes_rows
from tests.megatron.harness import Task, run_tasks, save_tiny_model, train_task

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]


def kernel(
    query: Tensor, key: Tensor, value: Tensor, query_bounds: Tensor, key_bounds: Tensor, *longest: int, **options: Any
) -> Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` says of itself, by plain attention."""
    assert options["window_size"] == (-1, 0)
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    counts, seen = query_bounds.diff().tolist(), key_bounds.diff().tolist()
    assert longest == (max(counts), max(seen))
    assert (len(query), len(key)) == (sum(counts), sum(seen))
    out = []
    for q, k, v in zip(query.split(counts), key.split(seen), value.split(seen), strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        shared = options["enable_gqa"]
        attended = F.scaled_dot_product_attention(q, k, v, mask, scale=options["scale"], enable_gqa=shared)
        out.append(attended.transpose(0, 1))
    return torch.cat(out)


def by_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention_module, "takes_rows", lambda query: True)
    patch.setattr(attention_module, "varlen_attn", kernel)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_both_ways_attend_to_the_same(size: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank of the context-parallel ones, with its share of the queries and all keys."""
    torch.manual_seed(0)
    lengths = [8 * size, 2 * size, 14 * size]
    heads, width, total = 4, 8, sum(lengths)
    query = torch.randn(total, heads, width, requires_grad=True)
    key, value = (torch.randn(total, groups, width, requires_grad=True) for _ in range(2))
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    parts = [zigzag_index(lengths, size, rank) for rank in range(size)]

    def gather(x: Tensor, **_: Any) -> Tensor:  # of every rank, whoever asks
        return torch.cat([torch.stack([key, value], 1)[part] for part in parts])

    monkeypatch.setattr(attention_module, "gather_from_sequence_parallel_region", gather)
    for rank in range(size):
        group = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        layer = PackedAttention(
            SimpleNamespace(attention_dropout=0.0),  # type: ignore[arg-type]
            1,
            AttnMaskType.causal,
            pg_collection=SimpleNamespace(cp=group),
        )
        row = PackedRow.of(lengths, bounds, size, rank)
        local = [x[parts[rank]] for x in (query, key, value)]
        found = {}
        for way in ("sequences", "rows"):
            with monkeypatch.context() as patch:
                if way == "rows":
                    by_rows(patch)
                out = layer(*local, packed_seq_params=row)
            found[way] = out, *torch.autograd.grad(out.square().sum(), (query, key, value), retain_graph=True)
        for ours, theirs in zip(found["rows"], found["sequences"], strict=True):
            torch.testing.assert_close(ours, theirs)


def rows_task(rank: int, world: int, **arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        by_rows(patch)
        return train_task(rank, world, **arguments)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "CP2": (2, {"context_parallel_size": 2}),
    "TP2 SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(save_tiny_model(tmp_path_factory.mktemp("rows") / "model", "qwen2"))
    found: dict[str, Any] = {}
    for world in (1, 2):
        tasks = {
            (name, function.__name__): Task(function, {"folder": folder, "flags": flags, "plan": {"max_tokens": 70}})
            for name, (size, flags) in CASES.items()
            if size == world
            for function in (train_task, rows_task)
        }
        found |= dict(zip(tasks, run_tasks(world, list(tasks.values())), strict=True))
    return found


@pytest.mark.parametrize("name", CASES)
def test_training_by_rows_is_training_by_sequences(name: str, results: dict[str, Any]) -> None:
    for found, expected in zip(results[name, "rows_task"], results[name, "train_task"], strict=True):
        assert found["first"] == pytest.approx(expected["first"], rel=1e-5, abs=1e-6)
        assert found["later"] == pytest.approx(expected["later"], rel=1e-5, abs=1e-6)
        for key, gradient in found["first gradients"].items():
            torch.testing.assert_close(gradient, expected["first gradients"][key], rtol=1e-4, atol=1e-6, msg=key)


def test_the_kernel_is_for_bfloat16_on_cuda() -> None:
    def query(kind: torch.dtype, *, cuda: bool, width: int = 64) -> Any:
        return SimpleNamespace(is_cuda=cuda, dtype=kind, shape=(9, 4, width), device="cuda:0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert takes_rows(query(torch.bfloat16, cuda=True))
        assert not takes_rows(query(torch.bfloat16, cuda=True, width=12))
        assert not takes_rows(query(torch.float32, cuda=True))
        assert not takes_rows(query(torch.bfloat16, cuda=False))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not takes_rows(query(torch.bfloat16, cuda=True))
