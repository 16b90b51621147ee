"""Hooks, estimators, precision and errors: what has no plain reference, compared between layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron.harness import (
    Reference,
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

HOOK = {"use_tis": True, "custom_tis_function_path": "tests.megatron.tis_hooks.reject_and_normalise"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "CP2": {"context_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "TP2": {"tensor_model_parallel_size": 2},
}
LOW_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "TP2 SP distributed optimizer": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True},
    ),
    "DP2 distributed optimizer": (2, {"use_distributed_optimizer": True}),
    "CP2": (2, {"context_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
}
"""Layouts in bfloat16: processes and flags."""
VARIANTS: dict[str, dict[str, Any]] = {
    "hook": HOOK,
    "hook, token mean": HOOK | {"calculate_per_token_loss": True},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo"},
    "importance sampling": {"advantage_estimator": "importance_sampling"},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus"},
}

COMPARED = [(name, layout) for name in VARIANTS for layout in LAYOUTS if layout in ("DP2", "CP2") or name == "hook"]


def step_task(rank: int, world: int, folder: str, **flags: Any) -> dict[str, Any]:
    """One call of two optimizer steps, so that old and new log-probabilities differ."""
    estimator = flags.pop("advantage_estimator", "grpo")
    args = make_args(folder, world, **flags).model_copy(
        update={"advantage_estimator": estimator, "global_batch_size": 4}
    )
    trainer = new_trainer(args)
    metrics = trainer.train(shares(trainer, args, make_samples()))
    return {"metrics": metrics, "weights": dict(trainer.hf_weights())}


def nan_task(rank: int, world: int, folder: str) -> tuple[str, bool]:
    """A loss that is not finite stops before the weights change."""
    args = make_args(folder, world)
    trainer = new_trainer(args)
    before = {name: tensor.clone() for name, tensor in trainer.hf_weights()}
    samples = make_samples()
    samples[0].advantages[:] = [float("nan")] * len(samples[0].advantages)
    samples[0].loss_mask[:] = [1.0] * len(samples[0].loss_mask)
    error = "nothing was raised"
    try:
        trainer.train(shares(trainer, args, samples))
    except FloatingPointError as raised:
        error = str(raised)
    return error, all(torch.equal(tensor, before[name]) for name, tensor in trainer.hf_weights())


def probe_task(rank: int, world: int, folder: str, ids: list[int]) -> list[float]:
    """Temperature 0 means unscaled, as engines score greedy samples."""
    value: list[float] = new_trainer(make_args(folder, world)).log_probs(ids, 0.0)
    return value


def layout_error_task(rank: int, world: int, folder: str) -> str:
    args = make_args(folder, 2, tensor_model_parallel_size=2)
    try:
        new_trainer(args)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = {"folder": str(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2"))}
    truncate = {"use_tis": True, "custom_tis_function_path": "tests.megatron.tis_hooks.truncate"}
    one = {name: Task(step_task, folder | flags) for name, flags in VARIANTS.items()}
    one |= {
        "built-in tis": Task(step_task, folder | {"use_tis": True}),
        "truncate hook": Task(step_task, folder | truncate),
        "nan": Task(nan_task, folder),
        "probe": Task(probe_task, folder | {"ids": make_samples()[0].token_ids}),
        "layout error": Task(layout_error_task, folder),
    }
    two = {f"{name} {layout}": Task(step_task, folder | VARIANTS[name] | LAYOUTS[layout]) for name, layout in COMPARED}
    for name, (world, flags) in LOW_LAYOUTS.items():
        (one if world == 1 else two)[f"bfloat16 {name}"] = Task(step_task, folder | flags | {"dtype": "bfloat16"})
    found: dict[str, Any] = dict(folder)
    for world, tasks in ((1, one), (2, two)):
        found |= dict(zip(tasks, run_tasks(world, list(tasks.values())), strict=True))
    return found


@pytest.mark.parametrize(("name", "layout"), COMPARED)
def test_nothing_depends_on_the_layout(name: str, layout: str, results: dict[str, Any]) -> None:
    (expected,) = results[name]
    for found in results[f"{name} {layout}"]:
        assert untimed(found["metrics"]) == pytest.approx(untimed(expected["metrics"]), rel=1e-5, abs=1e-6)
        for key, weight in found["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][key], rtol=1e-5, atol=2e-5, msg=key)


def test_a_hook_that_truncates_does_what_the_built_in_does(results: dict[str, Any]) -> None:
    (hook,), (built_in,) = results["truncate hook"], results["built-in tis"]
    for name in ("loss", "grad_norm", "entropy", "clip_fraction"):
        assert hook["metrics"][f"train/{name}"] == pytest.approx(
            built_in["metrics"][f"train/{name}"], rel=1e-5, abs=1e-7
        )
    assert hook["metrics"]["train/constant"] == 3.0
    assert 0.0 < hook["metrics"]["train/weight"] <= 2.0
    for key, weight in hook["weights"].items():
        torch.testing.assert_close(weight, built_in["weights"][key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LOW_LAYOUTS)
def test_bfloat16_is_near_float32(layout: str, results: dict[str, Any]) -> None:
    """Within 5% of the plain float32 run, or 0.02 where a number is small; gradients and their sums are float32."""
    samples = make_samples()
    steps = Reference(make_args(results["folder"])).train([samples[:4], samples[4:8], samples[8:]])
    for low in results[f"bfloat16 {layout}"]:
        for name in steps[0]:
            expected = sum(step[name] for step in steps) / len(steps)
            assert low["metrics"][f"train/{name}"] == pytest.approx(expected, rel=0.05, abs=0.02), name
        assert all(weight.dtype == torch.bfloat16 for weight in low["weights"].values())


def test_a_loss_that_is_not_finite_leaves_the_weights(results: dict[str, Any]) -> None:
    ((error, unchanged),) = results["nan"]
    assert "the loss is nan in optimizer step 0" in error
    assert unchanged


def test_probe_at_temperature_zero_is_unscaled(results: dict[str, Any]) -> None:
    (found,) = results["probe"]
    ids = torch.tensor(make_samples()[0].token_ids)
    with torch.no_grad():
        log_p = torch.log_softmax(Reference(make_args(results["folder"])).model(ids[None]).logits[0], -1)[:-1]
    expected = log_p.gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=0)


def test_a_layout_that_does_not_divide_the_processes_is_named(results: dict[str, Any]) -> None:
    (error,) = results["layout error"]
    assert "--tensor-model-parallel-size 2" in error
    assert "1 trainer processes" in error
