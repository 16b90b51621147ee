"""The operations of a step are compared with those that torch counts in a real forward pass."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from sleuth.arguments import model_flags
from sleuth.arguments.files_check import parse_config
from sleuth.arguments.hf_config import complete_config
from sleuth.metrics.speed import PEAK_TFLOPS, peak_tflops, training_flops, training_speed
from tests.tiny_models import Kind, make_tiny_model


def arguments(folder: Path, **changes: Any) -> Any:
    flags = model_flags(complete_config(parse_config(folder)))
    experts = {"num_experts": None, "moe_router_topk": None, "moe_ffn_hidden_size": None}
    return SimpleNamespace(**{**experts, **flags, "actor_world_size": 2, **changes})


@pytest.mark.parametrize(("kind", "tied"), [("qwen2", False), ("qwen3", True), ("qwen3_moe", False)])
def test_operations_are_those_that_torch_counts(tmp_path: Path, kind: Kind, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", kind, tie_word_embeddings=tied)
    args = arguments(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    samples, length = 3, 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.full((samples, length), 7))
    tokens = samples * length
    # Eager attention computes the half above the diagonal, too.
    spared = 2 * args.num_layers * args.num_attention_heads * args.kv_channels * length * tokens
    ours = training_flops(args, tokens, tokens, samples) / 3
    assert ours + spared == pytest.approx(counter.get_total_flops(), rel=0.02)  # norms, biases are in ours


def test_the_speed_of_a_step(tmp_path: Path) -> None:
    args = arguments(make_tiny_model(tmp_path / "model"))
    metrics = {"rollout/tokens": 3000.0, "rollout/samples": 10.0, "time/train": 2.0, "train/loss_tokens": 1000.0}
    speed = training_speed(args, metrics)
    assert speed == {
        "perf/train_tokens_per_second": 1500.0,
        "perf/train_tokens_per_second_per_device": 750.0,
    }  # nobody knows the peak of a CPU
    known = training_speed(args, metrics | {"perf/train_peak_tflops": 1e-3})
    expected = training_flops(args, 3000, 1000, 10) / 2.0 / 2 / 1e9
    assert known == speed | {"perf/train_share_of_peak": pytest.approx(expected)}
    assert training_speed(args, {}) == training_speed(args, {"time/train": 2.0}) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_are_found_by_the_names_that_cuda_gives(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_no_name_hides_a_more_special_one() -> None:
    names = list(PEAK_TFLOPS)
    assert all(earlier not in later for i, earlier in enumerate(names) for later in names[i + 1 :])
