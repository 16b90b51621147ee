"""Mixtures of experts (Qwen3-MoE) against plain torch, with expert parallelism; and their checkpoints.

`sleuth.arguments` does not let these models through yet, so the tests add the three flags that are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sleuth.arguments import model_flags
from tests.megatron.harness import (
    Reference,
    Task,
    make_args,
    make_samples,
    new_trainer,
    run_tasks,
    save_tiny_model,
    shares,
)

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]  # one fixture runs all cases

EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "EP2": (2, EP2),
    "EP2 distributed optimizer": (2, EP2 | {"use_distributed_optimizer": True}),
    "TP2 SP EP2": (2, SP | EP2),
    "TP2 SP, experts too": (2, SP | {"expert_tensor_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
}


def flags_of_mixtures(config: Mapping[str, Any]) -> dict[str, Any]:
    return model_flags({**config, "model_type": "qwen3"}) | {
        "num_experts": config.get("num_experts") or config["num_local_experts"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
    }


def moe_task(rank: int, world: int, folder: str, save: str, **flags: Any) -> dict[str, Any]:
    """Train, save, train on; then the second step once more, by a trainer that loads."""
    experts = {name: flags.pop(name) for name in list(flags) if name.startswith("expert_")}
    args = make_args(folder, world, save=save, **flags).model_copy(update=experts)
    with mock.patch("sleuth.megatron.model.model_flags", flags_of_mixtures):
        trainer = new_trainer(args)
        out: dict[str, Any] = {"first": trainer.train(shares(trainer, args, make_samples()))}
        trainer.save(1, {})
        out["second"] = trainer.train(shares(trainer, args, make_samples(seed=1)))
        out["weights"] = dict(trainer.hf_weights())
        trainer = new_trainer(args.model_copy(update={"load": Path(save)}))
        out["resumed"] = trainer.train(shares(trainer, args, make_samples(seed=1)))
        out["resumed weights"] = dict(trainer.hf_weights())
    return out


def separate_experts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers stacks the experts in memory; files, and the trainer, name each."""
    found: dict[str, torch.Tensor] = {}
    for name, stacked in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(stacked):
                for part, matrix in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = matrix
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(stacked):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = matrix
        else:
            found[name] = stacked
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(
        tmp_path_factory.mktemp("moe") / "model",
        "qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    )


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
def test_mixtures_compute_what_plain_torch_computes(
    name: str, model: Path, results: dict[str, list[dict[str, Any]]]
) -> None:
    reference = Reference(make_args(model))
    expected = [*reference.train([make_samples()]), *reference.train([make_samples(seed=1)])]
    weights = separate_experts(reference.weights())
    for out in results[name]:
        for found, step in zip((out["first"], out["second"]), expected, strict=True):
            assert found["train/loss"] == pytest.approx(step["loss"], rel=1e-5, abs=1e-6)
            assert found["train/grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-5)
        assert out["weights"].keys() == weights.keys()
        for key, weight in out["weights"].items():
            torch.testing.assert_close(weight, weights[key], rtol=1e-5, atol=2e-5, msg=key)


@pytest.mark.parametrize("name", CASES)
def test_resuming_repeats_the_run_bit_by_bit(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    for out in results[name]:
        assert out["resumed"] == out["second"]
        assert all(torch.equal(weight, out["weights"][key]) for key, weight in out["resumed weights"].items())
