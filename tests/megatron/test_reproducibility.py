"""Same data, same layout, same seed: the same bits after five steps, in processes started anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]  # one fixture runs all cases

SHARDED = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "TP2 SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, **SHARDED}),
    "DP2 distributed optimizer": (2, SHARDED),
}


def five_steps(rank: int, world: int, folder: str, **flags: Any) -> tuple[list[dict[str, float]], Any]:
    args = make_args(folder, world, entropy_coef=0.01, use_tis=True, **flags)
    trainer = new_trainer(args)
    steps = [trainer.train(shares(trainer, args, make_samples(seed=seed), max_tokens=70)) for seed in range(5)]
    return steps, dict(trainer.hf_weights())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All layouts, twice."""
    folder = {"folder": str(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2"))}
    found: list[dict[str, Any]] = [{}, {}]
    for world in (1, 2):
        tasks = {name: Task(five_steps, folder | flags) for name, (size, flags) in LAYOUTS.items() if size == world}
        for run in found:
            run |= dict(zip(tasks, run_tasks(world, list(tasks.values())), strict=True))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_metrics_are_the_same_bits(layout: str, runs: list[dict[str, Any]]) -> None:
    for (steps, weights), (again, weights_again) in zip(*(run[layout] for run in runs), strict=True):
        assert list(map(untimed, steps)) == list(map(untimed, again))
        assert weights.keys() == weights_again.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, weights_again[name]), name
