"""The trainer against plain torch in float32, in every parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sleuth.megatron.convert import hf_to_torch_dist
from tests.megatron.harness import Reference, Task, make_args, make_samples, run_tasks, save_tiny_model, train_task

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]  # one fixture runs all cases

POLICY = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k3",
    "entropy_coef": 0.01,
    "use_tis": True,
    "rollout_temperature": 0.8,
}
SFT = {"loss_type": "sft", "label_smoothing": 0.1}
TWO_SAMPLES: dict[str, Any] = {"micro_batch_size": 2}

# name -> (processes, model, flags, how micro-batches are made)
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "plain": (1, "qwen2", POLICY, TWO_SAMPLES),
    "one micro-batch": (1, "qwen2", POLICY, {"micro_batch_size": 8}),
    "dynamic micro-batches": (1, "qwen2", POLICY, {"max_tokens": 40}),
    "small chunks": (1, "qwen2", {**POLICY, "log_probs_chunk_size": 7}, TWO_SAMPLES),
    "token mean": (1, "qwen2", {**POLICY, "calculate_per_token_loss": True}, TWO_SAMPLES),
    "sft": (1, "qwen2", SFT, TWO_SAMPLES),
    "qwen3 tied": (1, "qwen3 tied", POLICY, TWO_SAMPLES),
    "llama": (1, "llama", SFT, TWO_SAMPLES),
    "recompute": (
        1,
        "qwen2",
        {**POLICY, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        TWO_SAMPLES,
    ),
    "no clipping": (1, "qwen2", {**POLICY, "clip_grad": 0}, TWO_SAMPLES),
    "TP2": (2, "qwen2", {**POLICY, "tensor_model_parallel_size": 2}, TWO_SAMPLES),
    "TP2 sft": (2, "qwen2", {**SFT, "tensor_model_parallel_size": 2}, TWO_SAMPLES),
    "TP2 SP": (2, "qwen3 tied", {**POLICY, "tensor_model_parallel_size": 2, "sequence_parallel": True}, TWO_SAMPLES),
    "PP2": (2, "qwen2", {**POLICY, "pipeline_model_parallel_size": 2}, TWO_SAMPLES),
    "PP2 tied": (2, "qwen3 tied", {**POLICY, "pipeline_model_parallel_size": 2}, {"max_tokens": 40}),
    "CP2": (2, "qwen2", {**POLICY, "context_parallel_size": 2}, TWO_SAMPLES),
    "DP2": (2, "qwen2", POLICY, TWO_SAMPLES),
    "DP2 sft": (2, "qwen2", SFT, {"max_tokens": 40}),
    "DP2 distributed optimizer": (2, "qwen2", {**POLICY, "use_distributed_optimizer": True}, TWO_SAMPLES),
    "TP2 SP CP2": (
        4,
        "qwen2",
        {**POLICY, "tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
        TWO_SAMPLES,
    ),
    "PP2 DP2 distributed optimizer": (
        4,
        "qwen3 tied",
        {**POLICY, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
        TWO_SAMPLES,
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models, each with its torch_dist checkpoint beside it as the frozen reference."""
    folder = tmp_path_factory.mktemp("models")
    found = {
        "qwen2": save_tiny_model(folder / "qwen2", "qwen2"),
        "qwen3 tied": save_tiny_model(folder / "qwen3", "qwen3", tied=True),
        "llama": save_tiny_model(folder / "llama", "llama"),
    }
    for path in found.values():
        hf_to_torch_dist(path, path.with_suffix(".torch_dist"))
    return found


def with_reference(flags: dict[str, Any], model: Path) -> dict[str, Any]:
    return flags | {"ref_load": model.with_suffix(".torch_dist")} if flags.get("use_kl_loss") else flags


@pytest.fixture(scope="module")
def results(models: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """Every case's results by rank; one start of the processes for each number of them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world in (1, 2, 4):
        names = [name for name, case in CASES.items() if case[0] == world]
        tasks = []
        for name in names:
            _, model, flags, plan = CASES[name]
            flags = with_reference(flags, models[model])
            sft = flags.get("loss_type") == "sft"
            tasks.append(Task(train_task, {"folder": str(models[model]), "flags": flags, "plan": plan, "sft": sft}))
        found |= dict(zip(names, run_tasks(world, tasks), strict=True))
    return found


@pytest.mark.parametrize("name", CASES)
def test_trainer_computes_what_plain_torch_computes(
    name: str, results: dict[str, list[dict[str, Any]]], models: dict[str, Path]
) -> None:
    world, model, flags, _ = CASES[name]
    args = make_args(models[model], world, **with_reference(flags, models[model]))
    sft = args.loss_type == "sft"
    samples = make_samples(sft=sft)
    reference = Reference(args)
    ranks = results[name]

    expected = _log_probs(reference, samples[0].token_ids, args.rollout_temperature)
    for out in ranks:
        torch.testing.assert_close(torch.tensor(out["log_probs"]), expected, atol=1e-5, rtol=0)

    (first,) = reference.train([samples])
    gradients = reference.gradients()
    for out in ranks:
        assert out["first"]["train/loss"] == pytest.approx(first["loss"], rel=1e-5, abs=1e-6)
        assert out["first"]["train/grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)
        assert out["first"]["train/tokens"] == sum(m > 0 for s in samples for m in s.loss_mask)
        for key, gradient in out.get("gradients", {}).items():
            assert _relative(gradient, gradients[key]) < 1e-5, key
    if "gradients" in ranks[0]:
        assert set().union(*(out["gradients"] for out in ranks)) == set(gradients)

    later = make_samples(sft=sft, seed=1)
    second = reference.train([later[:4], later[4:]])
    for out in ranks:
        norms = sum(step["grad_norm"] for step in second) / 2
        assert out["second"]["train/loss"] == pytest.approx(sum(s["loss"] for s in second) / 2, rel=1e-4, abs=1e-5)
        assert out["second"]["train/grad_norm"] == pytest.approx(norms, rel=1e-4)
        weights = reference.weights()
        assert set(out["weights"]) == set(weights)
        for key, weight in out["weights"].items():
            assert _relative(weight, weights[key]) < 2e-5, key


def _log_probs(reference: Reference, ids: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        log_p = torch.log_softmax(reference.model(torch.tensor([ids])).logits[0] / temperature, -1)
    return log_p[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-8))
