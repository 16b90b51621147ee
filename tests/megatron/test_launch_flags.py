"""The training flags of run_qwen2.5_3B.sh, as they stand there, on its four processes; only sizes are changed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from sleuth.arguments import Args, check_model, parse_args, read_hf_config
from sleuth.megatron.convert import hf_to_torch_dist
from tests.megatron.harness import Reference, Task, make_samples, new_trainer, run_tasks, save_tiny_model, shares

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("PARALLEL_ARGS", "GRPO_ARGS", "OPTIMIZER_ARGS", "MISC_ARGS", "PLACEMENT_ARGS", "ENGINE_ARGS")
SIZES = """
--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --vocab-size 96
--rotary-base 10000 --rollout-batch-size 3 --n-samples-per-prompt 4 --global-batch-size 12 --max-tokens-per-gpu 70
--balance-data --custom-rm-path a.b --cpu-threads-per-actor 1
"""


def script_flags() -> list[str]:
    """The model's flags, and the groups of the script that say how to train."""
    groups = "; ".join(f"/^{group}=(/,/^)/p" for group in GROUPS)
    words = " ".join(f'"${{{group}[@]}}"' for group in ("MODEL_ARGS", *GROUPS))
    command = (
        f'source scripts/models/qwen2.5-3B.sh; eval "$(sed -n "{groups}" run_qwen2.5_3B.sh)"; printf "%s\\n" {words}'
    )
    return subprocess.run(["bash", "-c", command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def script_args(model: str, reference: str) -> Args:
    files = ["--hf-checkpoint", model, "--ref-load", reference, "--prompt-data", "unused.jsonl"]
    args = parse_args([*script_flags(), *SIZES.split(), *files])
    return check_model(args, read_hf_config(args))


def train_as_the_script_does(rank: int, world: int, model: str, reference: str) -> list[dict[str, float]]:
    """Two steps, so that the second has left the reference."""
    args = script_args(model, reference)
    trainer = new_trainer(args)
    plan = {"max_tokens": args.max_tokens_per_gpu, "balance": args.balance_data}
    return [trainer.train(shares(trainer, args, make_samples(seed=seed), **plan)) for seed in range(2)]


def test_the_scripts_flags_train_as_plain_torch_does(tmp_path: Path) -> None:
    # The 3B model has biases of queries, keys and values, and ties its embeddings.
    model = save_tiny_model(tmp_path / "model", "qwen2", tied=True)
    hf_to_torch_dist(model, tmp_path / "reference")
    where: dict[str, Any] = {"model": str(model), "reference": str(tmp_path / "reference")}
    args = script_args(**where)
    assert (args.actor_world_size, args.tensor_model_parallel_size, args.data_parallel_size) == (4, 2, 2)
    assert (args.sequence_parallel, args.use_dynamic_batch_size, args.use_distributed_optimizer) == (True, True, True)
    assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == ("full", "uniform", 1)
    assert (args.advantage_estimator, args.kl_loss_type, args.adam_beta2) == ("grpo", "low_var_kl", 0.98)

    (ranks,) = run_tasks(4, [Task(train_as_the_script_does, where)])
    reference = Reference(args)
    expected = [*reference.train([make_samples()]), *reference.train([make_samples(seed=1)])]
    for steps in ranks:
        for found, plain in zip(steps, expected, strict=True):
            for name, value in plain.items():
                assert found[f"train/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name
            assert found["train/lr"] == 1e-6
