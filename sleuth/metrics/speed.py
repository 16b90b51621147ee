"""How fast a step was trained: tokens a second, and the share of what the devices can do at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sleuth.memory_plan import expert_parameters, num_parameters

if TYPE_CHECKING:
    from sleuth.arguments import Args

TERA = 1e12
PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.5,
    "H200": 989.5,
    "H100 PCIe": 756.0,
    "H100": 989.5,
    "H800": 989.5,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "RTX 4090": 165.2,
}
"""Dense bfloat16 TFLOP/s by a part of the name that CUDA gives a GPU, the more special first (NVIDIA's data sheets)."""


def peak_tflops(device_name: str) -> float | None:
    """The most bfloat16 TFLOP/s of the GPU with this name; None where it is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def training_speed(args: Args, metrics: Mapping[str, float]) -> dict[str, float]:
    """`perf/train_...` of a step, from its other metrics; {} where these are missing."""
    tokens, seconds = metrics.get("rollout/tokens"), metrics.get("time/train")
    if not tokens or not seconds:
        return {}
    speed = {
        "perf/train_tokens_per_second": tokens / seconds,
        "perf/train_tokens_per_second_per_device": tokens / seconds / args.actor_world_size,
    }
    peak, samples = metrics.get("perf/train_peak_tflops"), metrics.get("rollout/samples")
    trained = metrics.get("train/loss_tokens")
    if peak and samples and trained is not None:
        done = training_flops(args, tokens, trained, samples) / seconds / args.actor_world_size
        speed["perf/train_share_of_peak"] = done / (peak * TERA)
    return speed


def training_flops(args: Args, tokens: float, trained: float, samples: float) -> float:
    """Floating-point operations of one forward and backward pass over a step of so many tokens and samples.

    A multiplication with a matrix of n parameters takes 2 n per token forward and twice that backward; causal attention
    over a sequence of s tokens 2 s H c per token and layer forward. The output layer sees the `trained` tokens alone.
    All sequences are taken to be equally long, which is the least it can be. Scoring passes are not in it.
    """
    embedding = float((args.vocab_size or 0) * (args.hidden_size or 0))
    idle_experts = 0.0
    if args.num_experts:
        idle_experts = expert_parameters(args) * (1 - (args.moe_router_topk or 1) / args.num_experts)
    tables = 2 if args.untie_embeddings_and_output_weights else 1
    body = num_parameters(args) - tables * embedding - idle_experts
    width = (args.num_attention_heads or 0) * (args.kv_channels or 0)
    attention = 2 * (args.num_layers or 0) * width * tokens / samples
    return 3 * (tokens * (2 * body + attention) + trained * 2 * embedding)
