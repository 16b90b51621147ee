"""A kill at any moment of a save, and weights that ruin the training: the last good checkpoint is gone on from."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sleuth.checkpoints import find_checkpoint, resuming_problem
from tests.megatron.harness import (
    Task,
    make_args,
    make_samples,
    new_trainer,
    run_tasks,
    save_tiny_model,
    shares,
)
from tests.megatron.test_checkpoint import STATE, save_and_wait

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    model = tmp_path_factory.mktemp("checkpoints") / "model"
    save_tiny_model(model, "qwen2")
    return {"model": str(model)}


KILLS = {
    "while files are written": "sleuth.megatron.background_write.BackgroundWrite._run",
    "before the folder is complete": "sleuth.megatron.checkpoint.follow_umask",
    "before it takes its place": "sleuth.checkpoints._sync_to_disk",
    "before the tracker names it": "sleuth.checkpoints._write_text",
}


def killed(folder: str, save: str, target: str, port: int) -> None:
    """Save step 1, begin to save step 2, and be killed when `target` is called."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    trainer = new_trainer(make_args(folder, save=save))
    save_and_wait(trainer, 1, STATE)
    with mock.patch(target, side_effect=lambda *args: os.kill(os.getpid(), signal.SIGKILL)):
        save_and_wait(trainer, 2, STATE)


def test_a_kill_at_any_moment_leaves_the_last_checkpoint(tmp_path: Path, folders: dict[str, str]) -> None:
    context = multiprocessing.get_context("spawn")
    processes = []
    for number, target in enumerate(KILLS.values()):
        save = str(tmp_path / str(number))
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        processes.append(context.Process(target=killed, args=(folders["model"], save, target, port)))
        processes[-1].start()
    for number, process in enumerate(processes):
        process.join(300)
        assert process.exitcode == -signal.SIGKILL
        found = find_checkpoint(tmp_path / str(number))
        assert found == tmp_path / str(number) / "iter_0000001"
        assert resuming_problem(found, distributed=False) is None
        assert len(list((tmp_path / str(number)).iterdir())) == 3  # the second one, of whatever name, is there in part


def ruin_task(rank: int, world: int, folder: str, save: str) -> dict[str, Any]:
    """A checkpoint that training goes on from, one whose weights ruin the next loss, and weights that are not saved."""
    args = make_args(folder, world, save=save, save_keep=1)
    trainer, place = new_trainer(args), Path(save)

    def train() -> str:
        try:
            trainer.train(shares(trainer, args, make_samples()))
        except FloatingPointError as error:
            return str(error)
        return ""

    def place_of(value: float) -> None:
        with torch.no_grad():
            for chunk in trainer.chunks:
                dict(chunk.named_parameters())["decoder.final_layernorm.weight"].fill_(value)

    out: dict[str, Any] = {"first": train()}
    save_and_wait(trainer, 1, {})
    out["first"] += train()
    place_of(3e38)  # finite, and yet no logit is
    save_and_wait(trainer, 2, {})
    out["kept"] = sorted(path.name for path in place.glob("iter_*"))
    out["second"] = train()
    torch.distributed.barrier()  # the first rank writes the tracker
    out["tracker"] = (place / "latest_checkpointed_iteration.txt").read_text()
    resumed = new_trainer(make_args(folder, world, save=save, load=save))
    out["resumed"] = resumed.steps_done
    place_of(float("nan"))
    try:
        save_and_wait(trainer, 3, {})
    except FloatingPointError as error:
        out["third"] = str(error)
    out["after"] = sorted(path.name for path in place.glob("*iter_*"))
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_a_ruined_checkpoint_is_not_gone_on_from(
    world: int, folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    save = str(tmp_path_factory.mktemp("ruin") / "save")
    for found in run_tasks(world, [Task(ruin_task, {"folder": folders["model"], "save": save})])[0]:
        assert found["first"] == ""
        assert found["kept"] == ["iter_0000001", "iter_0000002"]  # with --save-keep 1: the good one is kept besides
        assert "The checkpoint of step 2 in" in found["second"]
        assert "now goes on from iter_0000001, the newest that training has gone on from" in found["second"]
        assert found["tracker"] == "1"
        assert found["resumed"] == 1
        assert "NaN or infinite values in decoder.final_layernorm.weight; they are not saved" in found["third"]
        assert found["after"] == ["iter_0000001", "iter_0000002"]
