"""The trainer's memory is lent and comes back: how much the device gets, that every bit returns, how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from tools.gpu_checks.results import Result
from tools.gpu_checks.trainer import SMALL, RandomTrainer, Settings, make_samples, one_step, read_shape

LEAST = 0.99
"""Of what the trainer holds, this share must be free on the device."""


def check(device: str, name: str) -> Iterator[Result]:
    shape = read_shape("qwen2.5-0.5B")[0] if device == "cuda" else SMALL
    trainer = RandomTrainer(Settings(), shape)
    step = one_step([make_samples([64, 64], shape.vocab_size)])
    trainer.train([step])
    held = sum(trainer.memory.held().values())
    before = _copies(trainer)
    in_use = _in_use(trainer)
    lending = _timed(trainer.memory.lend)
    freed = in_use - _in_use(trainer)
    returning = _timed(trainer.memory.take_back)
    trainer.memory.wait()
    same = all(torch.equal(a, b) for a, b in zip(before, _copies(trainer), strict=True))
    trainer.train([step])  # and it goes on
    good = same and freed >= LEAST * held
    found = (
        f"{freed / 1e9:.3f} of {held / 1e9:.3f} GB freed (at least {LEAST:.0%}); "
        f"{'every bit came back' if same else 'what came back DIFFERS'}; lent in {lending:.2f} s, back in "
        f"{returning:.2f} s"
    )
    figures = {"freed_gb": freed / 1e9, "held_gb": held / 1e9, "lend_seconds": lending, "return_seconds": returning}
    yield Result("lending memory", "ok" if good else "failed", found, figures)


def _copies(trainer: RandomTrainer) -> list[torch.Tensor]:
    """Weights and optimizer state, on the host."""
    tensors = [*(tensor for _, tensor in trainer.hf_weights()), *trainer.optimizer.tensors()]
    return [tensor.detach().cpu().clone() for tensor in tensors]


def _in_use(trainer: RandomTrainer) -> int:
    """Bytes that tensors take on the device; on a CPU nobody counts them but the trainer itself."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return sum(trainer.memory.held().values())


def _timed(action: Callable[[], None]) -> float:
    _synchronise()
    start = time.perf_counter()
    action()
    _synchronise()
    return time.perf_counter() - start


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
