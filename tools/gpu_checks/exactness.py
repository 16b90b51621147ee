"""The trainer on the device against the trainer on the CPU: log-probabilities, gradients, three optimizer steps.

float32 must agree to rounding. In bfloat16 both are measured against the CPU's float32: the device may err at most
twice as much as the CPU's own bfloat16 does, or by 1%.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from tools.gpu_checks.results import Result, judged
from tools.gpu_checks.trainer import SMALL, RandomTrainer, Settings, make_samples, one_step

LENGTHS = (7, 30, 64, 65, 100, 129, 150, 200)
STEPS = 3
TOLERANCES = {"log-probs": 1e-4, "gradients": 1e-3, "three updates": 1e-2, "gradient norms": 1e-3}
"""float32: of log-probabilities the mean absolute difference in nats, of the others |difference| / |expected|. Adam
turns the sign of a gradient near 0 into a whole step, hence more for its updates."""
BF16_FACTOR, BF16_LEAST = 2.0, 1e-2
DTYPES = ("float32", "bfloat16")
Runs = dict[str, dict[str, Tensor]]


def check(device: str, name: str) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpu.pt"
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "tools.gpu_checks.exactness", str(path)]
        reference = subprocess.Popen(command, env=environment, cwd=Path(__file__).resolve().parents[2])
        ours = {dtype: run(dtype) for dtype in DTYPES}
        if reference.wait():
            raise RuntimeError(f"the run on the CPU ended with {reference.returncode}")
        expected = torch.load(path)
    yield from compare(ours, expected)


def compare(ours: Runs, expected: Runs) -> Iterator[Result]:
    """`expected` is what the CPU computed, both by dtype."""
    exact = distances(ours["float32"], expected["float32"])
    yield judged(
        "trainer, float32", {what: (exact[what], most) for what, most in TOLERANCES.items()}, "against the CPU"
    )
    found = distances(ours["bfloat16"], expected["float32"])
    usual = distances(expected["bfloat16"], expected["float32"])
    limits = {what: (found[what], max(BF16_FACTOR * usual[what], BF16_LEAST)) for what in TOLERANCES}
    yield judged("trainer, bfloat16", limits, "against the CPU's float32")


def run(dtype: str) -> dict[str, Tensor]:
    """What a trainer computes, each as one row of numbers."""
    parallel_state.destroy_model_parallel()
    trainer = RandomTrainer(Settings(dtype=dtype, adam_eps=1e-5), SMALL)
    before = _row(trainer.hf_weights())
    samples = make_samples(LENGTHS, SMALL.vocab_size)
    log_probs = torch.tensor([value for s in samples[-3:] for value in trainer.log_probs(s.token_ids, 1.0)])
    norms = []
    for step in range(STEPS):
        norms.append(trainer.train([one_step([samples[:4], samples[4:]])])["train/grad_norm"])
        if step == 0:
            gradients = _row(trainer.weights.stage_tensors(_main_gradient))
    after = _row(trainer.hf_weights())
    return {
        "log-probs": log_probs,
        "gradients": gradients,
        "three updates": after - before,
        "gradient norms": torch.tensor(norms),
    }


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """How far `found` is from `expected`, in the units of `TOLERANCES`."""
    apart = {what: float((found[what] - expected[what]).norm() / expected[what].norm()) for what in TOLERANCES}
    return apart | {"log-probs": float((found["log-probs"] - expected["log-probs"]).abs().mean())}


def _main_gradient(parameter: Any) -> Tensor:
    gradient: Tensor = parameter.main_grad  # where megatron adds gradients up
    return gradient.detach()


def _row(named: Any) -> Tensor:
    return torch.cat([tensor.detach().float().cpu().flatten() for _, tensor in sorted(named)])


if __name__ == "__main__":
    torch.save({dtype: run(dtype) for dtype in DTYPES}, sys.argv[1])
