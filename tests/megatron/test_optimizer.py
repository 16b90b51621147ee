"""The learning-rate schedule, and the kernels of AdamW."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from sleuth.megatron.optimizer import PolicyOptimizer, learning_rate
from tests.megatron.harness import (
    Task,
    make_args,
    make_samples,
    new_trainer,
    run_tasks,
    save_tiny_model,
    shares,
    untimed,
)


def settings(**changes: Any) -> Any:
    values = {"lr": 1.0, "min_lr": 0.1, "lr_warmup_steps": 4, "lr_decay_steps": 14, "lr_decay_style": "linear"}
    return SimpleNamespace(**(values | changes))


def test_warm_up_moves_from_the_first_step() -> None:
    assert [learning_rate(settings(), step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("style", "middle"), [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55)])
def test_decay(style: str, middle: float) -> None:
    args = settings(lr_decay_style=style)
    assert learning_rate(args, 4) == pytest.approx(1.0)
    assert learning_rate(args, 9) == pytest.approx(middle)
    for step in (14, 1000):
        assert learning_rate(args, step) == pytest.approx(1.0 if style == "constant" else 0.1)


def test_cosine_is_slow_at_both_ends() -> None:
    linear, cosine = (settings(lr_decay_style=style) for style in ("linear", "cosine"))
    assert learning_rate(cosine, 5) > learning_rate(linear, 5)
    assert learning_rate(cosine, 13) < learning_rate(linear, 13)


def adam_task(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Three steps by the fused kernel, which CUDA takes and which a CPU has as well, and by the CPU's own way."""
    args = make_args(folder, use_distributed_optimizer=True)
    found: dict[str, Any] = {}
    for fused in (True, False):
        with mock.patch.object(PolicyOptimizer, "_fused", fused):
            trainer = new_trainer(args)
            metrics = [trainer.train(shares(trainer, args, make_samples(seed=step))) for step in range(3)]
            groups = trainer.optimizer.inner.param_groups
        found["fused" if fused else "plain"] = {
            "metrics": metrics,
            "weights": {name: weight.clone() for name, weight in trainer.hf_weights()},
            "kernels": [group["fused"] for group in groups],
        }
    return found


@pytest.mark.megatron
@pytest.mark.timeout(600)
def test_the_fused_kernel_takes_the_same_steps(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2")
    ((found,),) = run_tasks(1, [Task(adam_task, {"folder": str(folder)})])
    fused, plain = found["fused"], found["plain"]
    assert (set(fused["kernels"]), set(plain["kernels"])) == ({True}, {None})
    for ours, theirs in zip(fused["metrics"], plain["metrics"], strict=True):
        assert untimed(ours) == pytest.approx(untimed(theirs), rel=1e-5, abs=1e-6)
    for key, weight in fused["weights"].items():
        torch.testing.assert_close(weight, plain["weights"][key], rtol=1e-5, atol=1e-5, msg=key)
