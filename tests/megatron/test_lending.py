"""A trainer whose memory is lent and taken back around every step is the same trainer, bit for bit, in any layout."""

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

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]

SPLIT: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "single bfloat16": (1, {"dtype": "bfloat16"}),
    "TP2": (2, SPLIT),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "DP2": (2, {}),
    "DP2 bfloat16": (2, {"dtype": "bfloat16"}),
    "DP2 distributed optimizer": (2, {"use_distributed_optimizer": True}),
    "DP2 distributed optimizer bfloat16": (2, {"use_distributed_optimizer": True, "dtype": "bfloat16"}),
    "TP2 distributed optimizer bfloat16": (2, SPLIT | {"use_distributed_optimizer": True, "dtype": "bfloat16"}),
}


def lend_task(rank: int, world: int, folder: str, **flags: Any) -> dict[str, Any]:
    """The same three steps, of two optimizer steps each, without lending and with it."""
    args = make_args(folder, world, use_kl_loss=True, ref_load=folder, **flags).model_copy(
        update={"global_batch_size": 6}
    )
    plain = train(new_trainer(args), args, lending=False)
    return {"plain": plain, "lent": train(new_trainer(args), args, lending=True)}


def train(trainer: Any, args: Any, *, lending: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"metrics": [], "weights": [], "held": []}
    everything = trainer.memory.held()
    ids = make_samples()[0].token_ids
    for step in range(3):
        if lending:
            trainer.memory.lend()
            out["held"].append((trainer.memory.held(), on_device(trainer)))
            trainer.memory.lend()  # what is away stays so
            trainer.memory.take_back()
        out["metrics"].append(trainer.train(shares(trainer, args, make_samples(seed=step))))
        if lending:  # as when weights go to the engines
            trainer.memory.lend(("gradients", "optimizer"))
            assert trainer.memory.held() == everything | {"gradients": 0, "optimizer": 0}
        out["weights"].append({name: tensor.clone() for name, tensor in trainer.hf_weights()})
        out["metrics"].append(trainer.log_probs(ids, 1.0))
    trainer.memory.take_back()
    assert trainer.memory.held() == everything
    out["optimizer"] = [tensor.clone() for tensor in trainer.optimizer.tensors()]
    out["all"] = everything
    return out


def on_device(trainer: Any) -> int:
    """Bytes behind parameters, gradients and optimizer state, counted without the code under test."""
    tensors = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
    tensors += [parameter.main_grad for parameter in tensors]
    for optimizer in trainer.optimizer._torch_optimizers():
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = save_tiny_model(tmp_path_factory.mktemp("lending") / "model", "qwen2")
    found: dict[str, list[Any]] = {}
    for world in (1, 2):
        names = [name for name, (size, _) in LAYOUTS.items() if size == world]
        tasks = [Task(lend_task, {"folder": str(folder)} | LAYOUTS[name][1]) for name in names]
        found |= dict(zip(names, run_tasks(world, tasks), strict=True))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lending_changes_no_bit_of_what_is_trained(outcomes: dict[str, list[Any]], layout: str) -> None:
    for rank in outcomes[layout]:
        plain, lent = rank["plain"], rank["lent"]
        assert list(map(untimed, lent["metrics"])) == list(map(untimed, plain["metrics"]))
        for after, before in zip(lent["weights"], plain["weights"], strict=True):
            assert all(torch.equal(after[name], before[name]) for name in before)
        assert len(plain["optimizer"]) > 20
        assert all(torch.equal(a, b) for a, b in zip(lent["optimizer"], plain["optimizer"], strict=True))
        first, last = plain["weights"][0], plain["weights"][-1]
        assert not all(torch.equal(first[name], last[name]) for name in first)  # something was trained


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_the_model_is_left_where_it_was(outcomes: dict[str, list[Any]], layout: str) -> None:
    for rank in outcomes[layout]:
        assert all(rank["lent"]["all"].values())
        for held, bytes_left in rank["lent"]["held"]:
            assert not any(held.values())
            assert bytes_left == 0
