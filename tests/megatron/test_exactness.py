"""The trainer against plain torch in float32, in every parallel layout.

The plain run takes one sample at a time on one process. After it and after three more optimizer steps, loss, metrics,
gradients, their norm and weights must be the same within a relative 1e-5 (tensors: the norm of the difference over the
norm). Metrics that are differences of log-probabilities may lie near zero: they have 1e-6 nats besides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sleuth.megatron.convert import hf_to_torch_dist
from sleuth.sample import TrainSample
from tests.megatron.harness import (
    LOGGED,
    Reference,
    Task,
    make_args,
    make_samples,
    run_tasks,
    save_tiny_model,
    train_task,
)

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]  # one fixture runs all cases

EXACT = 1e-5

POLICY = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k3",
    "entropy_coef": 0.01,
    "use_tis": True,
    "rollout_temperature": 0.8,
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "policy": POLICY,
    "token mean": {**POLICY, "calculate_per_token_loss": True},
    "kl in the reward": {name: value for name, value in POLICY.items() if "kl_loss" not in name} | {"kl_coef": 0.2},
    # Adam turns rounding where a gradient is nearly 0 into a part of --lr, which a deep model amplifies.
    "small steps": {**POLICY, "lr": 1e-3},
    "no clipping": {**POLICY, "clip_grad": 0},
    "sft": {"loss_type": "sft", "label_smoothing": 0.1},
}

ONE_SAMPLE: dict[str, Any] = {"micro_batch_size": 1}
TWO_SAMPLES: dict[str, Any] = {"micro_batch_size": 2}
TOKENS: dict[str, Any] = {"max_tokens": 70}

TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**FULL, "recompute_method": "block"}


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Three groups of three heads, as in SmolLM2-135M, which tensor parallelism of 2 cannot split.
SMOLLM2 = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 72,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}


class Case(NamedTuple):
    """A layout, what is trained in it, and how micro-batches are made."""

    world: int
    flags: dict[str, Any]
    plan: dict[str, Any]
    model: str = "qwen2"
    objective: str = "policy"


CASES: dict[str, Case] = {
    "one sample": Case(1, {}, ONE_SAMPLE),
    "two samples": Case(1, {}, TWO_SAMPLES),
    "one micro-batch": Case(1, {}, {"micro_batch_size": 12}),
    "dynamic micro-batches": Case(1, {}, {"max_tokens": 40}),
    "small chunks": Case(1, {"log_probs_chunk_size": 7}, TWO_SAMPLES),
    "full recompute": Case(1, FULL, TWO_SAMPLES),
    "block recompute": Case(1, BLOCK, TWO_SAMPLES),
    "selective recompute": Case(1, {"recompute_granularity": "selective"}, TWO_SAMPLES),
    "token mean": Case(1, {}, TWO_SAMPLES, objective="token mean"),
    "no clipping": Case(1, {}, TWO_SAMPLES, objective="no clipping"),
    "sft": Case(1, {}, TWO_SAMPLES, objective="sft"),
    "kl in the reward": Case(1, {}, TWO_SAMPLES, objective="kl in the reward"),
    "qwen3 tied": Case(1, {}, TWO_SAMPLES, "qwen3 tied"),
    "eight layers tied": Case(1, {}, TWO_SAMPLES, "eight layers tied", "small steps"),
    "llama sft": Case(1, {}, TWO_SAMPLES, "llama", "sft"),
    "llama": Case(1, {}, TWO_SAMPLES, "llama"),
    "llama tied": Case(1, {}, TWO_SAMPLES, "llama tied"),
    "smollm2": Case(1, {}, TWO_SAMPLES, "smollm2"),
    "smollm2 sft": Case(1, {}, TWO_SAMPLES, "smollm2", "sft"),
    "moe": Case(1, {}, TWO_SAMPLES, "moe"),
    "moe, weights not normalised": Case(1, {}, TWO_SAMPLES, "moe unnormalised"),
    "TP2": Case(2, TP2, TWO_SAMPLES),
    "TP2 sft": Case(2, TP2, TWO_SAMPLES, objective="sft"),
    "TP2 SP": Case(2, SP2, TWO_SAMPLES, "qwen3 tied"),
    "TP2 SP full recompute": Case(2, {**SP2, **FULL}, TOKENS),
    "PP2": Case(2, PP2, TWO_SAMPLES),
    "PP2 tied": Case(2, PP2, {"max_tokens": 40}, "qwen3 tied"),
    "TP2 llama": Case(2, TP2, TWO_SAMPLES, "llama"),
    "TP2 SP llama tied": Case(2, SP2, TWO_SAMPLES, "llama tied"),
    "PP2 smollm2": Case(2, PP2, TWO_SAMPLES, "smollm2"),
    "CP2 smollm2": Case(2, CP2, ONE_SAMPLE, "smollm2"),
    "DP2 smollm2 distributed optimizer": Case(2, SHARDED, TWO_SAMPLES, "smollm2"),
    "CP2": Case(2, CP2, ONE_SAMPLE),
    "CP2 token mean": Case(2, CP2, TOKENS, objective="token mean"),
    "CP2 kl in the reward": Case(2, CP2, TWO_SAMPLES, objective="kl in the reward"),
    "PP2 kl in the reward": Case(2, PP2, TWO_SAMPLES, objective="kl in the reward"),
    "DP2 kl in the reward": Case(2, {}, TOKENS, objective="kl in the reward"),
    "DP2": Case(2, {}, TWO_SAMPLES),
    "DP2 in turn": Case(2, {}, {**ONE_SAMPLE, "balance": False}),
    "DP2 sft": Case(2, {}, {"max_tokens": 40}, objective="sft"),
    "DP2 distributed optimizer": Case(2, SHARDED, TWO_SAMPLES),
    "moe EP2": Case(2, EP2, TWO_SAMPLES, "moe"),
    "moe EP2 distributed optimizer": Case(2, {**EP2, **SHARDED}, TOKENS, "moe"),
    "moe TP2 SP EP2": Case(2, {**SP2, **EP2}, TWO_SAMPLES, "moe"),
    "moe TP2 SP, experts too": Case(2, {**SP2, "expert_tensor_parallel_size": 2}, TWO_SAMPLES, "moe"),
    "moe PP2": Case(2, PP2, TWO_SAMPLES, "moe"),
    "moe CP2 EP2": Case(2, {**CP2, **EP2}, ONE_SAMPLE, "moe"),
    "TP4": Case(4, {"tensor_model_parallel_size": 4}, TWO_SAMPLES, "eight layers tied", "small steps"),
    "PP4": Case(4, {"pipeline_model_parallel_size": 4}, TWO_SAMPLES, "eight layers tied", "small steps"),
    "PP4 interleaved": Case(
        4,
        {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 1},
        TWO_SAMPLES,
        "eight layers tied",
        "small steps",
    ),
    "CP4": Case(4, {"context_parallel_size": 4}, ONE_SAMPLE),
    "DP4": Case(4, {}, TOKENS),
    "TP2 SP CP2": Case(4, {**SP2, **CP2}, ONE_SAMPLE),
    "TP2 PP2": Case(4, {**TP2, **PP2}, TOKENS),
    "TP2 SP DP2": Case(4, {**SP2, **SHARDED, **FULL}, TOKENS),
    "PP2 CP2 tied": Case(4, {**PP2, **CP2}, TWO_SAMPLES, "qwen3 tied"),
    "PP2 DP2 tied": Case(4, {**PP2, **SHARDED}, TWO_SAMPLES, "qwen3 tied"),
    "CP2 DP2": Case(4, {**CP2, **SHARDED}, {**TOKENS, "balance": False}),
    "TP2 PP2 llama tied": Case(4, {**TP2, **PP2}, TOKENS, "llama tied"),
    "moe EP4": Case(4, {"expert_model_parallel_size": 4}, TWO_SAMPLES, "moe"),
    "moe PP2 EP2": Case(4, {**PP2, **EP2, **SHARDED}, TWO_SAMPLES, "moe"),
    "moe TP2 SP DP2 EP2, recompute": Case(4, {**SP2, **EP2, **FULL}, TOKENS, "moe"),
}


FIRST = ", scored first"
"""Ends the names of cases that are another one with a pass of its own for the log-probabilities before the step."""
SCORED_FIRST = ("two samples", "TP2 SP", "PP2", "CP2", "DP2 distributed optimizer", "moe EP2", "moe")
CASES |= {
    name + FIRST: CASES[name]._replace(flags=CASES[name].flags | {"score_old_log_probs": True}) for name in SCORED_FIRST
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models, each with its torch_dist checkpoint beside it as the frozen reference."""
    folder = tmp_path_factory.mktemp("models")
    found = {
        "qwen2": save_tiny_model(folder / "qwen2", "qwen2"),
        "qwen3 tied": save_tiny_model(folder / "qwen3", "qwen3", tied=True),
        "eight layers tied": save_tiny_model(
            folder / "eight", "qwen3", tied=True, num_hidden_layers=8, num_key_value_heads=4
        ),
        "moe": save_tiny_model(folder / "moe", "qwen3_moe", **MIXTURE, norm_topk_prob=True),
        "moe unnormalised": save_tiny_model(folder / "moe2", "qwen3_moe", **MIXTURE, norm_topk_prob=False),
        "llama": save_tiny_model(folder / "llama", "llama"),
        "llama tied": save_tiny_model(folder / "llama tied", "llama", tied=True),
        "smollm2": save_tiny_model(folder / "smollm2", "llama", tied=True, **SMOLLM2),
    }
    for path in found.values():
        hf_to_torch_dist(path, path.with_suffix(".torch_dist"))
    return found


def all_flags(case: Case, model: Path) -> dict[str, Any]:
    flags = OBJECTIVES[case.objective] | case.flags
    return (
        flags | {"ref_load": model.with_suffix(".torch_dist")}
        if "kl_coef" in flags or flags.get("use_kl_loss")
        else flags
    )


@pytest.fixture(scope="module")
def results(models: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """Every case's results by rank; one start of the processes for each number of them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world in (1, 2, 4):
        cases = {name: case for name, case in CASES.items() if case.world == world}
        tasks = [
            Task(
                train_task,
                {
                    "folder": str(models[case.model]),
                    "flags": all_flags(case, models[case.model]),
                    "plan": case.plan,
                    "sft": case.objective == "sft",
                },
            )
            for case in cases.values()
        ]
        found |= dict(zip(cases, run_tasks(world, tasks), strict=True))
    return found


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Any:
    """The plain run of a model and an objective, made once."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def run(case: Case) -> dict[str, Any]:
        key = (case.model, case.objective)
        if key not in known:
            model = models[case.model]
            known[key] = plain_run(make_args(model, **all_flags(case._replace(flags={}), model)))
        return known[key]

    return run


def plain_run(args: Any) -> dict[str, Any]:
    sft = args.loss_type == "sft"
    reference, samples, later = Reference(args), make_samples(sft=sft), make_samples(sft=sft, seed=1)
    found: dict[str, Any] = {"log_probs": log_probs(reference, samples[0].token_ids, args.rollout_temperature)}
    (found["first"],) = reference.train([samples])
    found["first logged"] = _expected_log(reference, samples)
    found["first gradients"] = reference.gradients()
    steps = reference.train([later[:4], later[4:8], later[8:]])
    found["later"] = {name: sum(step[name] for step in steps) / 3 for name in steps[0]}
    found["later logged"] = _expected_log(reference, later)
    found["later gradients"] = reference.gradients()
    found["weights"] = reference.weights()
    return found


def _expected_log(reference: Reference, samples: list[TrainSample]) -> dict[int, list[float | None]]:
    """What the trainer is to keep of the samples that are logged; nothing in supervised training."""
    if reference.args.loss_type == "sft":
        return {}
    return {
        index: [
            value if mask else None
            for value, mask in zip(reference.log_probs[index].tolist(), samples[index].loss_mask, strict=True)
        ]
        for index in LOGGED
    }


def log_probs(reference: Reference, ids: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        log_p = torch.log_softmax(reference.model(torch.tensor([ids])).logits[0] / temperature, -1)
    return log_p[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("name", CASES)
def test_the_log_probabilities_of_logged_samples_are_kept_by_one_rank_each(
    name: str, results: dict[str, list[dict[str, Any]]], plain: Any
) -> None:
    expected = plain(CASES[name])
    for part in ("first logged", "later logged"):
        found = [(index, values) for out in results[name] for index, values in out[part].items()]
        assert sorted(index for index, _ in found) == sorted(expected[part])
        for index, values in found:
            assert values == pytest.approx(expected[part][index], abs=1e-5), (part, index)


@pytest.mark.parametrize("name", CASES)
def test_trainer_computes_what_plain_torch_computes(
    name: str, results: dict[str, list[dict[str, Any]]], plain: Any
) -> None:
    expected = plain(CASES[name])
    for out in results[name]:
        torch.testing.assert_close(torch.tensor(out["log_probs"]), expected["log_probs"], atol=1e-5, rtol=0)
        for part in ("first", "later"):
            for metric, value in expected[part].items():
                assert out[part][f"train/{metric}"] == pytest.approx(value, rel=EXACT, abs=1e-6), (part, metric)
            for key, gradient in out[f"{part} gradients"].items():
                assert relative(gradient, expected[f"{part} gradients"][key]) < EXACT, (part, key)
        assert out["weights"].keys() == expected["weights"].keys()
        for key, weight in out["weights"].items():
            assert relative(weight, expected["weights"][key]) < EXACT, key
    if results[name][0]["first gradients"]:
        stages = (out["first gradients"] for out in results[name])
        assert set().union(*stages) == set(expected["first gradients"]), "a gradient that no stage has"


@pytest.mark.parametrize("name", CASES)
def test_every_metric_is_that_of_a_single_process(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    case = CASES[name]
    alike = (other for other, c in CASES.items() if (c.world, c.model, c.objective) == (1, case.model, case.objective))
    expected = results[next(alike)][0]
    for out in results[name]:
        for part in ("first", "later"):
            assert out[part] == pytest.approx(expected[part], rel=EXACT, abs=1e-6)


@pytest.mark.parametrize("name", SCORED_FIRST)
def test_the_pass_that_is_left_out_would_have_changed_nothing(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    """The first step is one optimizer step, whose own forward pass has the same log-probabilities: ratios are 1."""
    for out, scored in zip(results[name], results[name + FIRST], strict=True):
        assert out["passes"] + 1 == scored["passes"]
        assert out["first"] == pytest.approx(scored["first"], rel=1e-6, abs=1e-6)
        for key, gradient in out["first gradients"].items():
            assert relative(gradient, scored["first gradients"][key]) < 1e-6, key
        assert out["later"] == pytest.approx(scored["later"], rel=EXACT, abs=1e-6)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.plan == ONE_SAMPLE and case.world > 1])
def test_some_rank_held_no_trained_token(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    """Of the one-token response every rank but one has nothing, of the sample without trained tokens all."""
    counts = [out["trained tokens"] for out in results[name]]
    assert 0 in {count for rank in counts for count in rank}
    assert any(max(ranks) > 0 == min(ranks) for ranks in zip(*counts, strict=True))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm; a tensor whose norm is below 1e-6 counts as 1e-6."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))
