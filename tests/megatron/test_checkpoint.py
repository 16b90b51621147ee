"""Checkpoints: whole or not there, exact on resuming, readable in another layout."""

from __future__ import annotations

import errno
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from sleuth.manifest import content_problems, read_manifest
from sleuth.megatron.background_write import BackgroundWrite
from sleuth.megatron.convert import hf_to_torch_dist
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

STATE = {"data": {"epoch": 1, "position": 7}}
DISTRIBUTED = {"use_distributed_optimizer": True}
PP4 = {"pipeline_model_parallel_size": 4, "use_distributed_optimizer": True}
INTERLEAVED = {**PP4, "num_layers_per_virtual_pipeline_stage": 1}


def save_task(rank: int, world: int, folder: str, save: str, **flags: Any) -> dict[str, Any]:
    """Train, save at step 1, train on while it is written; what a resumed run must repeat."""
    args = make_args(folder, world, save=save, **flags)
    trainer = new_trainer(args)
    assert (trainer.steps_done, trainer.rollout_state) == (0, {})
    trainer.train(shares(trainer, args, make_samples()))
    with writing_held_up() as go_on:
        trainer.save(1, STATE)
        out = {
            "finished early": trainer.finish_save(wait=False),
            "metrics": trainer.train(shares(trainer, args, make_samples(seed=1))),
            "weights": {name: weight.clone() for name, weight in trainer.hf_weights()},
        }
        trainer.memory.lend()  # as while engines generate
        out["listing"] = sorted(path.name for path in Path(save).iterdir())
        torch.distributed.barrier()
        go_on.set()
        trainer.finish_save()
    return out | {"finished": trainer.finish_save(wait=False)}


def synchronous_task(rank: int, world: int, folder: str, save: str, **flags: Any) -> None:
    """What `save_task` saves, written before anything else is done."""
    args = make_args(folder, world, save=save, no_async_save=True, **flags)
    trainer = new_trainer(args)
    trainer.train(shares(trainer, args, make_samples()))
    trainer.save(1, STATE)
    assert (Path(save) / "latest_checkpointed_iteration.txt").is_file()


def one_rank_fails_task(rank: int, world: int, folder: str, save: str, **flags: Any) -> dict[str, Any]:
    """The disk of the last rank is full while a checkpoint is written, with one before it that pruning may not take."""
    trainer = new_trainer(make_args(folder, world, save=save, save_keep=1, **flags))
    save_and_wait(trainer, 1, STATE)
    out = {"error": ""}
    with writing_held_up(OSError(errno.ENOSPC, "No space left on device") if rank == world - 1 else None) as go_on:
        trainer.save(2, STATE)
        out["while"] = " ".join(sorted(path.name for path in Path(save).iterdir()))
        go_on.set()
        try:
            trainer.finish_save()
        except Exception as raised:
            out["error"] = f"{type(raised).__name__}: {raised}"
    torch.distributed.barrier()  # the first rank cleans up
    out["after"] = " ".join(sorted(path.name for path in Path(save).iterdir()))
    torch.distributed.barrier()
    save_and_wait(trainer, 3, STATE)
    out["next"] = " ".join(sorted(path.name for path in Path(save).iterdir()))
    return out


@contextmanager
def writing_held_up(error: Exception | None = None) -> Iterator[threading.Event]:
    """Inside the block, threads begin to write a checkpoint's files, or raise, only when the event is set."""
    go_on, write = threading.Event(), BackgroundWrite._run

    def run(self: BackgroundWrite, work: Callable[[], None], files: list[str]) -> None:
        def fail() -> None:
            assert error is not None
            raise error

        go_on.wait()
        write(self, fail if error else work, files)

    with mock.patch.object(BackgroundWrite, "_run", run):
        yield go_on


def resume_task(rank: int, world: int, folder: str, load: str, **flags: Any) -> dict[str, Any]:
    """Load and train the second step. The model starts from other weights, which must not matter."""
    args = make_args(folder, world, load=load, **flags)
    trainer = new_trainer(args)
    assert (trainer.steps_done, trainer.rollout_state) == (1, STATE)
    return {
        "metrics": trainer.train(shares(trainer, args, make_samples(seed=1))),
        "weights": dict(trainer.hf_weights()),
    }


# Everything that a user can set of Adam and its schedule; with these the next step differs in every respect.
SETTINGS = {
    **{"lr": 3e-2, "lr_decay_style": "linear", "lr_decay_steps": 4, "min_lr": 1e-3, "weight_decay": 0.4},
    **{"adam_beta1": 0.5, "adam_beta2": 0.7, "adam_eps": 1e-2, "clip_grad": 0.05},
}


def other_settings_task(rank: int, world: int, folder: str, load: str, **flags: Any) -> dict[str, Any]:
    """Load with other settings of the optimizer: what its groups hold then, and a step."""
    args = make_args(folder, world, load=load, **SETTINGS, **flags)
    trainer = new_trainer(args)
    names = ("betas", "eps", "lr", "weight_decay")
    groups = [{name: group[name] for name in names} for group in trainer.optimizer.inner.param_groups]
    metrics = trainer.train(shares(trainer, args, make_samples(seed=1)))
    return {"groups": groups, "metrics": metrics, "weights": dict(trainer.hf_weights())}


def finetune_task(rank: int, world: int, folder: str, load: str, **flags: Any) -> dict[str, Any]:
    """Start from a checkpoint's weights alone, and train a step."""
    args = make_args(folder, world, load=load, finetune=True, **flags)
    trainer = new_trainer(args)
    before = {name: weight.clone() for name, weight in trainer.hf_weights()}
    started = (trainer.steps_done, trainer.rollout_state, trainer.optimizer.steps_done)
    metrics = trainer.train(shares(trainer, args, make_samples(seed=1)))
    return {"started": started, "before": before, "metrics": metrics, "weights": dict(trainer.hf_weights())}


def robust_task(rank: int, world: int, folder: str, save: str) -> dict[str, Any]:
    """Saves that fail at different moments, left-overs, pruning and saving a step again."""
    args = make_args(folder, world, save=save, save_keep=2)
    trainer, place = new_trainer(args), Path(save)
    out: dict[str, Any] = {}

    def listing() -> tuple[list[str], str]:
        tracker = (place / "latest_checkpointed_iteration.txt").read_text()
        return sorted(path.name for path in place.iterdir()), tracker

    save_and_wait(trainer, 1, {"n": 1})
    out["errors"] = [_failing_save(trainer, *target) for target in FAILURES]
    out["after errors"] = listing()

    leftover = place / ".unfinished-iter_0000009"
    leftover.mkdir()
    (leftover / "half").write_text("a killed run left this")
    save_and_wait(trainer, 2, {"n": 2})
    out["after left-over"] = listing()
    save_and_wait(trainer, 2, {"n": "again"})
    out["again"] = json.loads((place / "iter_0000002" / "rollout_state.json").read_text())
    save_and_wait(trainer, 3, {"n": 3})
    save_and_wait(trainer, 4, {"n": 4})
    out["after pruning"] = listing()
    return out


def save_and_wait(trainer: Any, step: int, state: dict[str, Any]) -> None:
    trainer.save(step, state)
    trainer.finish_save()


FAILURES = [
    ("sleuth.megatron.background_write.dist_checkpointing.save", OSError(errno.ENOSPC, "No space left on device")),
    ("sleuth.megatron.checkpoint.follow_umask", OSError(errno.EIO, "Input/output error")),
    ("sleuth.checkpoints.publish", KeyboardInterrupt()),
]


def _failing_save(trainer: Any, target: str, error: BaseException) -> str:
    with mock.patch(target, side_effect=error):
        try:
            save_and_wait(trainer, 2, {"n": 2})
        except BaseException as raised:
            return type(raised).__name__
    return "nothing was raised"


def small_disk_task(rank: int, world: int, folder: str, save: str) -> str:
    trainer = new_trainer(make_args(folder, world, save=save))
    with mock.patch("shutil.disk_usage", return_value=SimpleNamespace(free=1000)):
        try:
            trainer.save(1, {})
        except OSError as error:
            return f"{error} {sorted(path.name for path in Path(save).iterdir())}"
    return "nothing was raised"


def full_disk_task(rank: int, world: int, folder: str, save: str) -> tuple[str, str]:
    """A real write error in the middle of a file: the process may not write files over 20 kB."""
    import resource

    trainer = new_trainer(make_args(folder, world, save=save))
    save_and_wait(trainer, 1, STATE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    error = "nothing was raised"
    try:
        save_and_wait(trainer, 2, STATE)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    left = sorted(path.name for path in Path(save).iterdir())
    return error, " ".join(left)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    save_tiny_model(root / "model", "qwen2")
    save_tiny_model(root / "other", "qwen2", seed=9)
    save_tiny_model(root / "deep", "qwen2", num_hidden_layers=8)
    save_tiny_model(root / "deep other", "qwen2", num_hidden_layers=8, seed=9)
    names = (
        "model",
        "other",
        "deep",
        "deep other",
        "plain",
        "sharded",
        "interleaved",
        "reference",
        "robust",
        "small",
        "full",
        "failing",
        "plain, synchronous",
        "sharded, synchronous",
        "interleaved, synchronous",
    )
    return {name: str(root / name) for name in names}


@pytest.fixture(scope="module")
def results(folders: dict[str, str]) -> dict[str, Any]:
    """One start of the processes for each number of them."""
    model, other = {"folder": folders["model"]}, {"folder": folders["other"]}
    hf_to_torch_dist(Path(folders["model"]), Path(folders["reference"]))
    with_reference = {"ref_load": folders["reference"], "use_kl_loss": True}
    one = {
        "plain": Task(save_task, model | {"save": folders["plain"]}),
        "plain, other settings": Task(other_settings_task, other | {"load": folders["plain"]}),
        "plain, weights alone": Task(finetune_task, other | {"load": folders["plain"]} | with_reference),
        "plain resumed": Task(resume_task, other | {"load": folders["plain"]}),
        "robust": Task(robust_task, model | {"save": folders["robust"]}),
        "small disk": Task(small_disk_task, model | {"save": folders["small"]}),
        "plain, synchronous": Task(synchronous_task, model | {"save": folders["plain, synchronous"]}),
        "full disk": Task(full_disk_task, model | {"save": folders["full"]}),
    }
    two = {
        "plain on TP2": Task(resume_task, other | {"load": folders["plain"], "tensor_model_parallel_size": 2}),
        "plain on PP2": Task(resume_task, other | {"load": folders["plain"], "pipeline_model_parallel_size": 2}),
        "sharded": Task(save_task, model | {"save": folders["sharded"]} | DISTRIBUTED),
        "sharded, synchronous": Task(synchronous_task, model | {"save": folders["sharded, synchronous"]} | DISTRIBUTED),
        "one rank fails": Task(
            one_rank_fails_task, model | {"save": folders["failing"], "tensor_model_parallel_size": 2}
        ),
        "sharded resumed": Task(resume_task, other | {"load": folders["sharded"]} | DISTRIBUTED),
        "sharded, other settings": Task(other_settings_task, other | {"load": folders["sharded"]} | DISTRIBUTED),
        "sharded, weights alone": Task(finetune_task, other | {"load": folders["sharded"]} | DISTRIBUTED),
        "sharded on TP2": Task(
            resume_task, other | {"load": folders["sharded"], "tensor_model_parallel_size": 2} | DISTRIBUTED
        ),
    }
    deep, deep_other = {"folder": folders["deep"]}, {"folder": folders["deep other"]}
    four = {
        "interleaved": Task(save_task, deep | {"save": folders["interleaved"]} | INTERLEAVED),
        "interleaved, synchronous": Task(
            synchronous_task, deep | {"save": folders["interleaved, synchronous"]} | INTERLEAVED
        ),
        "interleaved resumed": Task(resume_task, deep_other | {"load": folders["interleaved"]} | INTERLEAVED),
        "interleaved on PP4": Task(resume_task, deep_other | {"load": folders["interleaved"]} | PP4),
    }
    found: dict[str, Any] = {}
    for world, tasks in ((1, one), (2, two), (4, four)):
        found |= dict(zip(tasks, run_tasks(world, list(tasks.values())), strict=True))
    return found


@pytest.mark.parametrize("name", ["plain", "sharded", "interleaved"])
def test_resuming_repeats_the_run_bit_by_bit(name: str, results: dict[str, Any]) -> None:
    for expected, found in zip(results[name], results[f"{name} resumed"], strict=True):
        assert untimed(found["metrics"]) == untimed(expected["metrics"])
        assert found["weights"].keys() == expected["weights"].keys()
        for key, weight in found["weights"].items():
            assert torch.equal(weight, expected["weights"][key]), key


@pytest.mark.parametrize("name", ["plain", "sharded", "interleaved"])
def test_what_is_written_in_the_background_is_what_a_synchronous_save_writes(
    name: str, folders: dict[str, str], results: dict[str, Any]
) -> None:
    """While it was written, the trainer took a step and lent its memory."""
    for out in results[name]:
        assert out["listing"] == [".unfinished-iter_0000001"]
        assert (out["finished early"], out["finished"]) == (False, True)
    found, expected = (stored(Path(folders[place]) / "iter_0000001") for place in (name, f"{name}, synchronous"))
    assert len(found) >= 30
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("name", ["plain", "sharded", "interleaved", "plain, synchronous"])
def test_each_checkpoint_has_a_manifest_of_all_its_files(
    name: str, folders: dict[str, str], results: dict[str, Any]
) -> None:
    found = Path(folders[name]) / "iter_0000001"
    entries = read_manifest(found)
    assert entries is not None
    assert entries.keys() == {path.name for path in found.iterdir()} - {"manifest.json"}
    assert content_problems(found, entries) == []


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors in a checkpoint's files."""
    keys = set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    found = _load_state_dict_from_keys(keys, storage_reader=FileSystemReader(checkpoint))
    return {key: value for key, value in found.items() if torch.is_tensor(value)}


def test_one_rank_that_cannot_write_is_an_error_of_all(folders: dict[str, str], results: dict[str, Any]) -> None:
    tracker = "latest_checkpointed_iteration.txt"
    for out in results["one rank fails"]:
        assert f"could not be written to {folders['failing']}" in out["error"]
        assert "No space left on device" in out["error"]
        assert out["while"] == f".unfinished-iter_0000002 iter_0000001 {tracker}"
        assert out["after"] == f"iter_0000001 {tracker}"
        assert out["next"] == f"iter_0000003 {tracker}"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("plain on TP2", "plain"),
        ("plain on PP2", "plain"),
        ("sharded on TP2", "sharded"),
        ("interleaved on PP4", "interleaved"),
    ],
)
def test_resuming_in_another_layout(name: str, source: str, results: dict[str, Any]) -> None:
    expected, found = results[source][0], results[name][0]
    assert found["metrics"]["train/grad_norm"] == pytest.approx(expected["metrics"]["train/grad_norm"], rel=1e-5)
    for key, weight in found["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][key], rtol=1e-5, atol=2e-5, msg=key)


def after_a_step(folders: dict[str, str]) -> Reference:
    """The same training in plain torch, up to where the checkpoint was saved."""
    reference = Reference(make_args(folders["model"]))
    reference.train([make_samples()])
    return reference


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each tensor within 1e-5 of its norm."""
    for name, weight in found.items():
        difference = (weight - expected[name]).norm() / expected[name].norm()
        assert difference < 1e-5, f"{name}: {difference:.1e}"


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_other_settings_of_the_optimizer_hold_after_resuming(
    name: str, folders: dict[str, str], results: dict[str, Any]
) -> None:
    reference = after_a_step(folders)
    reference.args = make_args(folders["model"], **SETTINGS)
    lr = 3e-2 + (1e-3 - 3e-2) / 4  # a straight line over 4 optimizer steps, of which one is done
    for group in reference.optimizer.param_groups:
        decay = SETTINGS["weight_decay"] if group["weight_decay"] else 0.0
        group.update(lr=lr, betas=(0.5, 0.7), eps=1e-2, weight_decay=decay)
    (expected,) = reference.train([make_samples(seed=1)])
    for found in results[f"{name}, other settings"]:
        for group in found["groups"]:
            assert (group["betas"], group["eps"]) == ((0.5, 0.7), 1e-2)
            assert group["lr"] == pytest.approx(lr)
        assert {group["weight_decay"] for group in found["groups"]} == {0.0, 0.4}
        assert found["metrics"]["train/lr"] == pytest.approx(lr)
        assert found["metrics"]["train/grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert_close(found["weights"], reference.weights())


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_finetuning_takes_the_weights_and_nothing_else(
    name: str, folders: dict[str, str], results: dict[str, Any]
) -> None:
    first = after_a_step(folders)
    fresh = Reference(make_args(folders["model"]))
    fresh.model.load_state_dict(first.model.state_dict())
    for found in results[f"{name}, weights alone"]:
        assert found["started"] == (0, {}, 0)
        assert_close(found["before"], first.weights())
    if name == "sharded":
        fresh.train([make_samples(seed=1)])
        for found in results[f"{name}, weights alone"]:
            assert_close(found["weights"], fresh.weights())


def test_finetuning_keeps_the_reference_of_its_own_flag(results: dict[str, Any]) -> None:
    (found,) = results["plain, weights alone"]
    assert found["metrics"]["train/kl_loss"] > 1e-3  # the checkpoint's policy has left the reference by a step


def test_a_failed_save_leaves_the_last_checkpoint(results: dict[str, Any]) -> None:
    (out,) = results["robust"]
    assert out["errors"] == ["OSError", "OSError", "KeyboardInterrupt"]
    names, tracker = out["after errors"]
    assert tracker == "1"
    assert [name for name in names if not name.startswith(".")] == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_left_overs_are_removed_and_the_latest_are_kept(results: dict[str, Any]) -> None:
    (out,) = results["robust"]
    assert out["after left-over"] == (["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"], "2")
    assert out["again"] == {"n": "again"}
    assert out["after pruning"] == (["iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"], "4")


def test_a_disk_that_is_too_small_is_an_error_before_writing(results: dict[str, Any]) -> None:
    (message,) = results["small disk"]
    assert "GB free" in message
    assert message.endswith("[]")


def test_a_write_that_fails_is_an_error(results: dict[str, Any]) -> None:
    ((error, left),) = results["full disk"]
    assert "could not be written" in error
    assert left == "iter_0000001 latest_checkpointed_iteration.txt"
