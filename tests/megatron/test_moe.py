"""Mixtures of experts (Qwen3-MoE): their checkpoints, and the way to and from Hugging Face's format.

That they compute what plain torch computes, in every layout, is a matter of `test_exactness.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sleuth.megatron.convert import hf_to_torch_dist, torch_dist_to_hf
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

EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "EP2": (2, EP2),
    "EP2 distributed optimizer": (2, EP2 | {"use_distributed_optimizer": True}),
    "TP2 SP EP2": (2, SP | EP2),
}


def moe_task(rank: int, world: int, folder: str, save: str, **flags: Any) -> dict[str, Any]:
    """Train, save, train on; then the second step once more, by a trainer that loads."""
    args = make_args(folder, world, save=save, **flags)
    trainer = new_trainer(args)
    trainer.train(shares(trainer, args, make_samples()))
    trainer.save(1, {})
    trainer.finish_save()
    out = {"second": trainer.train(shares(trainer, args, make_samples(seed=1))), "weights": dict(trainer.hf_weights())}
    trainer = new_trainer(args.model_copy(update={"load": Path(save)}))
    out["resumed"] = trainer.train(shares(trainer, args, make_samples(seed=1)))
    return out | {"resumed weights": dict(trainer.hf_weights())}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    return save_tiny_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", **mixture)


@pytest.fixture(scope="module")
def results(model: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for world in (1, 2):
        names = [name for name, case in CASES.items() if case[0] == world]
        tasks = [
            Task(moe_task, {"folder": str(model), "save": str(model.with_name(name))} | CASES[name][1])
            for name in names
        ]
        found |= dict(zip(names, run_tasks(world, tasks), strict=True))
    return found


@pytest.mark.parametrize("name", CASES)
def test_resuming_repeats_the_run_bit_by_bit(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    for out in results[name]:
        assert untimed(out["resumed"]) == untimed(out["second"])
        assert all(torch.equal(weight, out["weights"][key]) for key, weight in out["resumed weights"].items())


def test_every_tensor_comes_back_under_its_name(model: Path, tmp_path: Path) -> None:
    hf_to_torch_dist(model, tmp_path / "dist")
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back")
    expected, found = (load_file(path / "model.safetensors") for path in (model, tmp_path / "back"))
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in found  # one tensor an expert, as engines read them
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
