"""A model of real shape with random weights: its memory against the plan's estimate, and its speed.

The share of the peak counts what the model needs (6 operations a weight and token, attention besides), not what is
computed twice to save memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from sleuth.megatron.model import ModelShape
from sleuth.memory_plan import TRAINER_CONTEXT, MemoryPlan, memory_plan, num_parameters
from tools.gpu_checks.results import Result, needs_cuda
from tools.gpu_checks.trainer import SMALL, RandomTrainer, Settings, make_samples, one_step, read_shape

RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {"0.5B": ("qwen2.5-0.5B", {}), "3B": ("qwen2.5-3B", RECOMPUTE)}
"""The script that has the shape, and flags."""
SAMPLE_TOKENS = 2048
ROWS = (16384, 8192, 4096)
"""Tokens of a micro-batch: the most that fits."""
MICRO_BATCHES, TRIALS = 2, 3
TOLERANCE = 0.1
PEAKS = {  # the longer name first
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Operations per second in bfloat16, without sparsity, as the makers state them."""


def check(device: str, name: str) -> Iterator[Result]:
    script, changes = SIZES[name]
    shape, flags = read_shape(script)
    settings = Settings(lr=1e-6, **changes)
    if device != "cuda":
        shape, settings = replace(SMALL, num_layers=2), replace(settings, dtype="float32")
        flags |= {name: getattr(shape, name) for name in ModelShape.__slots__}
    total = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 2**40
    plans = {tokens: plan_of(settings, flags, tokens) for tokens in (ROWS if device == "cuda" else (256,))}
    fitting = [tokens for tokens, plan in plans.items() if plan.peak + TRAINER_CONTEXT < 0.95 * total]
    if not fitting:
        least = (min(plan.peak for plan in plans.values()) + TRAINER_CONTEXT) / 1e9
        for what in ("memory", "speed"):
            yield Result(f"{name}, {what}", "skipped", f"needs {least:.0f} GB, the GPU has {total / 1e9:.0f}")
        return
    tokens = fitting[0]
    trainer = RandomTrainer(settings, shape, fast=True)
    if device == "cuda":
        yield memory(name, trainer, shape, plans[tokens], tokens)
    else:
        yield needs_cuda(f"{name}, memory")
    yield speed(name, device, trainer, shape, flags, tokens)


def plan_of(settings: Settings, flags: dict[str, Any], tokens: int) -> MemoryPlan:
    """The plan's estimate for one row of `tokens` tokens, by what a run's flags would say."""
    experts = dict.fromkeys(("num_experts", "moe_router_topk", "moe_ffn_hidden_size"))
    args: Any = SimpleNamespace(**vars(settings), **(experts | flags), max_tokens_per_gpu=tokens)
    return memory_plan(args, 80e9, 0)


def memory(size: str, trainer: RandomTrainer, shape: ModelShape, plan: MemoryPlan, tokens: int) -> Result:
    """What the trainer holds, and the most in a step, beside the plan."""
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.train([one_step([row(shape, tokens)])])
    peak = torch.cuda.max_memory_allocated()
    return compare_memory(size, resident, peak, plan, tokens)


def compare_memory(size: str, resident: float, peak: float, plan: MemoryPlan, tokens: int) -> Result:
    pairs = {"resident": (resident, plan.resident), "peak": (peak, plan.peak)}
    wrong = any(abs(found / planned - 1) > TOLERANCE for found, planned in pairs.values())
    parts = [f"{what} {found / 1e9:.2f} GB, planned {planned / 1e9:.2f}" for what, (found, planned) in pairs.items()]
    figures = {f"{what}_gb": found / 1e9 for what, (found, _) in pairs.items()}
    figures |= {f"planned_{what}_gb": planned / 1e9 for what, (_, planned) in pairs.items()}
    found = f"{'; '.join(parts)} (within {TOLERANCE:.0%}; {tokens:,} tokens)"
    return Result(f"{size}, memory", "failed" if wrong else "ok", found, figures)


def speed(
    size: str, device: str, trainer: RandomTrainer, shape: ModelShape, flags: dict[str, Any], tokens: int
) -> Result:
    """Tokens per second of whole optimizer steps, the best of several."""
    step = one_step([row(shape, tokens, seed) for seed in range(MICRO_BATCHES)])
    seconds = []
    for _ in range(1 + TRIALS):  # the first compiles and allocates
        start = time.perf_counter()
        trainer.train([step])
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    rate = MICRO_BATCHES * tokens / min(seconds[1:])
    done = rate * operations_per_token(shape, flags, min(SAMPLE_TOKENS, tokens))
    product = matmul_speed(device)
    figures = {"tokens_per_second": rate, "tflops": done / 1e12, "share_of_matmul": done / product}
    found = f"{rate:,.0f} tokens/s, {done / 1e12:.3g} TFLOP/s, {done / product:.0%} of a large matrix product here"
    if device == "cuda" and (peak := peak_of(torch.cuda.get_device_name())):
        figures["share_of_peak"] = done / peak
        found += f", {done / peak:.0%} of the GPU's peak"
    return Result(f"{size}, speed", "ok", found, figures)


def row(shape: ModelShape, tokens: int, seed: int = 0) -> Any:
    length = min(SAMPLE_TOKENS, tokens)
    return make_samples([length] * (tokens // length), shape.vocab_size, seed)


def operations_per_token(shape: ModelShape, flags: dict[str, Any], length: int) -> float:
    """Of forward and backward pass: 6 a weight of a matrix, and 6 L H c a token that a query sees, half of `length`."""
    experts = dict.fromkeys(("num_experts", "moe_router_topk", "moe_ffn_hidden_size"))
    args: Any = SimpleNamespace(**(experts | flags))
    embedding = shape.vocab_size * shape.hidden_size
    weights = num_parameters(args) - (embedding if shape.untie_embeddings_and_output_weights else 0)
    return 6.0 * weights + 6.0 * shape.num_layers * shape.num_attention_heads * shape.kv_channels * length


def peak_of(name: str) -> float | None:
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def matmul_speed(device: str) -> float:
    """Operations per second of a large product in the dtype of the model."""
    side, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2.0 * side**3 / best
