"""The mismatch correction in the trainer: the same in every layout, and what its masks do to the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sleuth.metrics.catalog import MISMATCH
from tests.megatron.harness import (
    Task,
    hf_statistics,
    load_hf,
    make_args,
    make_samples,
    new_trainer,
    run_tasks,
    save_tiny_model,
    shares,
)
from tests.megatron.tis_hooks import REJECTED_BELOW

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]  # one fixture runs all cases

METRICS = {metric.name for metric in MISMATCH}
COUNT = 8
MIS = "mis.compute_mis_weights_with_cp"
REJECT = "tests.megatron.tis_hooks.reject"

SETTINGS: dict[str, dict[str, Any]] = {
    "token": {"use_tis": True, "tis_upper_bound": 3.0, "tis_batch_normalize": True},
    "sequence": {
        "use_tis": True, "tis_level": "sequence", "tis_mode": "clip", "tis_upper_bound": 1e4,
        "tis_batch_normalize": True, "use_rs": True, "rs_level": "geometric", "rs_upper_bound": 4.0,
        "rs_lower_bound": 0.1, "rs_veto_threshold": 5e-3,
    },
    "geometric": {
        "use_tis": True, "tis_level": "geometric", "tis_mode": "mask", "tis_upper_bound": 3.0,
        "use_rs": True, "rs_upper_bound": 6.0, "rs_veto_threshold": None,
    },
}  # fmt: skip
FLAGS: dict[str, dict[str, Any]] = {
    "token": {"calculate_per_token_loss": True},
    "sequence": {},
    "geometric": {"calculate_per_token_loss": True, "rejected_in_denominator": True},
}
ONE, TWO = {"micro_batch_size": 1}, {"micro_batch_size": 2}
# name -> (processes, flags, how micro-batches are made)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one micro-batch": (1, {}, {"micro_batch_size": 4}),
    "dynamic": (1, {}, {"max_tokens": 40}),
    "DP2": (2, {}, ONE),
    "CP2": (2, {"context_parallel_size": 2}, TWO),
    "PP2": (2, {"pipeline_model_parallel_size": 2}, TWO),
    "TP2 CP2": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}, TWO),
    "DP2 CP2": (4, {"context_parallel_size": 2}, {"max_tokens": 60}),
}
DENOMINATORS = [
    (per_token, stay, layout) for per_token in (False, True) for stay in (False, True) for layout in ("single", "DP2")
]


def trainer_and_args(folder: str, world: int, settings: dict[str, Any], flags: dict[str, Any]) -> tuple[Any, Any]:
    custom = dict(settings)
    flags = {"custom_tis_function_path": MIS, "use_tis": custom.pop("use_tis", True), "n_samples_per_prompt": 4} | flags
    args = make_args(folder, world, rollout_batch_size=COUNT // 4, rollout_temperature=0.8, **flags)
    args = args.model_copy(update={"custom_config": custom, "global_batch_size": COUNT // 2})
    return new_trainer(args), args


def layout_task(
    rank: int, world: int, folder: str, settings: dict[str, Any], flags: dict[str, Any], plan: dict[str, Any]
) -> dict[str, Any]:
    """Two optimizer steps on one rollout."""
    trainer, args = trainer_and_args(folder, world, settings, flags)
    metrics = trainer.train(shares(trainer, args, make_samples(COUNT), **plan))
    return {"metrics": metrics, "weights": dict(trainer.hf_weights())}


def one_step_task(rank: int, world: int, folder: str, flags: dict[str, Any]) -> dict[str, Any]:
    """One optimizer step with a hook that rejects tokens: metrics and gradients."""
    flags = {"custom_tis_function_path": REJECT, "entropy_coef": 0.01, "clip_grad": 0} | flags
    trainer, args = trainer_and_args(folder, world, {}, flags)
    args = args.model_copy(update={"global_batch_size": COUNT})
    metrics = trainer.train(shares(trainer, args, make_samples(COUNT), micro_batch_size=2))
    return {"metrics": metrics, "gradients": dict(trainer.weights.stage_tensors(lambda p: p.main_grad.clone()))}


def broken_task(rank: int, world: int, folder: str, settings: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """An engine's NaN at a trained token, against the same sample without a trained token."""
    broken, without = make_samples(COUNT), make_samples(COUNT)
    place = broken[4].loss_mask.index(1.0)
    broken[4].rollout_log_probs[place] = float("nan")
    without[4].loss_mask[:] = [0.0] * len(without[4].loss_mask)
    found: dict[str, Any] = {}
    for name, samples in (("broken", broken), ("without", without)):
        trainer, args = trainer_and_args(folder, world, settings, flags)
        try:
            metrics = trainer.train(shares(trainer, args, samples, micro_batch_size=2))
            found[name] = {"metrics": metrics, "weights": dict(trainer.hf_weights())}
        except (FloatingPointError, RuntimeError) as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tmp = tmp_path_factory.mktemp("model")
    folder = str(save_tiny_model(tmp / "m", "qwen2"))
    tasks: dict[int, dict[str, Task]] = {1: {}, 2: {}, 4: {}}
    for name, settings in SETTINGS.items():
        common = {"folder": folder, "settings": settings}
        tasks[1][name] = Task(layout_task, common | {"flags": FLAGS[name], "plan": ONE})
        for layout, (world, flags, plan) in LAYOUTS.items():
            tasks[world][f"{name} {layout}"] = Task(layout_task, common | {"flags": FLAGS[name] | flags, "plan": plan})
    for per_token, stay, layout in DENOMINATORS:
        flags = {"calculate_per_token_loss": per_token, "rejected_in_denominator": stay}
        tasks[2 if layout == "DP2" else 1][f"reject {per_token} {stay} {layout}"] = Task(
            one_step_task, {"folder": folder, "flags": flags}
        )
    dump = {"use_tis": True, "mis_dump_dir": str(tmp / "dump")}
    tasks[1]["dump"] = Task(layout_task, {"folder": folder, "settings": dump, "flags": {}, "plan": ONE})
    mask, stop = {"use_tis": True}, {"use_tis": True, "mis_nonfinite": "stop"}
    tasks[1]["broken"] = Task(broken_task, {"folder": folder, "settings": mask, "flags": {}})
    stages = {"pipeline_model_parallel_size": 2}
    tasks[2]["stop PP2"] = Task(broken_task, {"folder": folder, "settings": stop, "flags": stages})
    found: dict[str, Any] = {"folder": folder, "dumped": tmp / "dump"}
    for world, some in tasks.items():
        found |= dict(zip(some, run_tasks(world, list(some.values())), strict=True))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_depends_on_the_layout(name: str, layout: str, results: dict[str, Any]) -> None:
    (expected,) = results[name]
    metrics = {key: value for key, value in expected["metrics"].items() if not key.startswith("time/")}
    assert 0.02 < metrics["mis/rejected_token_fraction"] + metrics.get("mis/tis_truncate_fraction", 0.0) < 0.95
    for found in results[f"{name} {layout}"]:
        timed = {key: found["metrics"].pop(key, None) for key in list(found["metrics"]) if key.startswith("time/")}
        assert set(timed) == {"time/importance_sampling", "time/score"}
        assert found["metrics"] == pytest.approx(metrics, rel=1e-4, abs=2e-6)
        for key, weight in found["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][key], rtol=1e-5, atol=2e-5, msg=key)


def test_every_metric_is_described(results: dict[str, Any]) -> None:
    for name in SETTINGS:
        logged = {key for key in results[name][0]["metrics"] if key.startswith("mis/")}
        assert logged
        assert logged <= METRICS


def test_train_log_probs_are_those_before_the_updates_at_the_rollout_temperature(results: dict[str, Any]) -> None:
    """In both optimizer steps of a rollout: the second, too, is compared with the policy that generated."""
    model = load_hf(results["folder"])
    samples = make_samples(COUNT)
    files = sorted(Path(results["dumped"]).iterdir())
    assert len(files) == 2
    for file, step in zip(files, (samples[: COUNT // 2], samples[COUNT // 2 :]), strict=True):
        with torch.no_grad():
            expected = [hf_statistics(model, s, 0.8)[:, 0][torch.tensor(s.loss_mask) != 0] for s in step]
        with np.load(file) as data:
            # Micro-batches may hold the samples in another order.
            found = sorted(zip(data["train"].tolist(), data["rollout"].tolist(), strict=True))
        rollout = [p for s in step for p, m in zip(s.rollout_log_probs, s.loss_mask, strict=True) if m]
        wanted = sorted(zip(torch.cat(expected).tolist(), rollout, strict=True))
        np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize(("per_token", "stay", "layout"), DENOMINATORS)
def test_what_rejected_tokens_do_to_the_denominators(
    per_token: bool, stay: bool, layout: str, results: dict[str, Any]
) -> None:
    model = load_hf(results["folder"])
    samples = make_samples(COUNT)
    masks = [torch.tensor(sample.loss_mask) for sample in samples]
    kept = [m * (torch.tensor(s.rollout_log_probs) >= REJECTED_BELOW) for m, s in zip(masks, samples, strict=True)]
    assert 0 < sum(float(k.sum()) for k in kept) < 0.8 * sum(float(m.sum()) for m in masks)
    counted = masks if stay else kept
    tokens = sum(float(mask.sum()) for mask in counted)
    loss = torch.zeros(())
    for sample, mask, own in zip(samples, kept, counted, strict=True):
        chosen, entropy, _ = hf_statistics(model, sample, 0.8).unbind(1)
        value = -(chosen - chosen.detach()).exp() * torch.tensor(sample.advantages) - 0.01 * entropy
        loss = loss + (value * mask).sum() / (tokens if per_token else COUNT * max(float(own.sum()), 1.0))
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for found in results[f"reject {per_token} {stay} {layout}"]:
        assert found["metrics"]["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
        assert found["metrics"]["train/tokens"] == sum(float(k.sum()) for k in kept)
        for name, gradient in found["gradients"].items():
            error = (gradient - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-8)
            assert error < 1e-5, name


def test_a_broken_log_probability_costs_its_sample_alone(results: dict[str, Any]) -> None:
    ((found),) = results["broken"]
    broken, without = found["broken"], found["without"]
    assert broken["metrics"].pop("mis/nonfinite_tokens") == pytest.approx(0.5), "one, in one of two optimizer steps"
    assert broken["metrics"].pop("mis/nonfinite_samples") == pytest.approx(0.5)
    for name, value in broken["metrics"].items():
        if not name.startswith("time/"):
            assert value == pytest.approx(without["metrics"][name], rel=1e-5, abs=1e-7), name
    for name, weight in broken["weights"].items():
        torch.testing.assert_close(weight, without["weights"][name], rtol=1e-6, atol=1e-7)


def test_every_rank_stops_where_one_finds_a_broken_log_probability(results: dict[str, Any]) -> None:
    first, last = results["stop PP2"]
    assert "FloatingPointError: 1 trainable tokens of 1 samples" in first["broken"]["error"]
    assert last["broken"]["error"].startswith("FloatingPointError: 1 trainable tokens")
    assert "error" not in first["without"]
