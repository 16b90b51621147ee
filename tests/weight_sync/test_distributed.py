"""Weights by broadcast: trainer ranks of a mixture of experts, and two real engines in one process group over gloo."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sleuth.engine.key import engine_session
from sleuth.engine.process_group import group_members
from sleuth.engine.server import EngineConfig, EngineServer
from sleuth.weight_sync.control import WeightSyncError
from sleuth.weight_sync.distributed import BroadcastGroup
from tests.conftest import load_float32
from tests.megatron.harness import Task, make_args, run_tasks, separate_experts
from tests.tiny_models import make_tiny_model

IDS = list(range(5, 60))
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What the engines start with, and another model of the same shape."""
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_model(folder / str(seed), "qwen3_moe", seed=seed) for seed in (0, 7)]


@pytest.fixture(scope="module")
def models(paths: list[Path]) -> list[PreTrainedModel]:
    return [load_float32(path) for path in paths]


@pytest.fixture(scope="module")
def servers(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineServer]]:
    logs = tmp_path_factory.mktemp("logs")
    configs = [EngineConfig(paths[0], dtype="float32", log_path=logs / f"{i}.log") for i in range(2)]
    servers = [EngineServer(config) for config in configs]
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(EngineServer.start, servers))
        yield servers
    finally:
        for server in servers:
            server.stop()


def tensors_of(model: PreTrainedModel) -> Tensors:
    return separate_experts({name: parameter.detach() for name, parameter in model.named_parameters()})


def assert_serves(server: EngineServer, model: PreTrainedModel, version: str) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 1}
    body = {"input_ids": IDS, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    meta = engine_session().post(f"{server.url}/generate", json=body, timeout=60).json()["meta_info"]
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()
    assert [entry[0] for entry in meta["input_token_logprobs"][1:]] == pytest.approx(expected, abs=1e-4)
    assert meta["weight_version"] == version


def push_from_rank(rank: int, world: int, folder: Path, urls: list[str]) -> str:
    """One rank of a trainer that holds the model in `folder`."""
    from sleuth.megatron.trainer import Trainer

    args = make_args(folder, world, tensor_model_parallel_size=world)
    weights = Trainer(args).hf_weights()
    if rank > 0:
        return f"{len(list(weights))} tensors"
    with closing(BroadcastGroup(urls)) as group:
        group.push(weights, "trained", bucket_bytes=50_000)
    return group.name


@pytest.mark.engine
class TestTwoEngines:
    """In this order: the last ones end their engines."""

    def test_updates_in_turn_over_one_group(self, servers: list[EngineServer], models: list[PreTrainedModel]) -> None:
        with closing(BroadcastGroup([server.url for server in servers])) as group:
            for version, model, bucket_bytes in (("1", models[1], 30_000), ("2", models[0], 2**28)):
                for server in servers:  # the prefix cache is full of the old weights'
                    assert server.is_healthy()
                group.push(tensors_of(model).items(), version, bucket_bytes=bucket_bytes)
                for server in servers:
                    assert_serves(server, model, version)

    @pytest.mark.megatron
    def test_a_tensor_parallel_trainer(
        self, servers: list[EngineServer], models: list[PreTrainedModel], paths: list[Path]
    ) -> None:
        urls = [server.url for server in servers]
        [ranks] = run_tasks(2, [Task(push_from_rank, {"folder": paths[1], "urls": urls})])
        assert ranks[1] == f"{len(tensors_of(models[1]))} tensors"
        for server in servers:
            assert_serves(server, models[1], "trained")
            left = engine_session().post(
                f"{server.url}/destroy_weights_update_group", json={"group_name": ranks[0]}, timeout=60
            )
            assert "does not exist" in left.text

    def test_bytes_that_do_not_fit(self, servers: list[EngineServer], models: list[PreTrainedModel]) -> None:
        tensors = tensors_of(models[0])
        wrong = tensors | {"model.norm.weight": torch.ones(7)}
        with closing(BroadcastGroup([server.url for server in servers])) as group:
            with pytest.raises(WeightSyncError, match="left PAUSED"):
                group.push(wrong.items(), "wrong")
            group.push(tensors.items(), "right")  # repeating the update repairs it, over the same group
        assert_serves(servers[1], models[0], "right")

    def test_an_engine_that_dies_midway(self, servers: list[EngineServer], models: list[PreTrainedModel]) -> None:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for count, pair in enumerate(tensors_of(models[0]).items()):
                if count == 8:
                    servers[1].stop()
                yield pair

        start = time.monotonic()
        with (
            closing(BroadcastGroup([server.url for server in servers])) as group,
            pytest.raises(WeightSyncError, match=f"(?s){servers[1].url}.*left PAUSED"),
        ):
            group.push(tensors(), "late", bucket_bytes=20_000)
        assert time.monotonic() - start < 60

    def test_an_engine_that_hangs(self, servers: list[EngineServer], models: list[PreTrainedModel]) -> None:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for count, pair in enumerate(tensors_of(models[0]).items()):
                if count == 8:
                    for process in group_members(servers[0].pid):
                        os.kill(process.pid, signal.SIGSTOP)
                yield pair

        start = time.monotonic()
        with (
            closing(BroadcastGroup([servers[0].url], timeout=3.0)) as group,
            pytest.raises(WeightSyncError, match="left PAUSED"),
        ):
            group.push(tensors(), "never", bucket_bytes=20_000)
        assert time.monotonic() - start < 60


def test_an_engine_that_is_gone_never_joins() -> None:
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"127\.0\.0\.1:1/init_weights_update_group cannot be reached"):
        BroadcastGroup(["http://127.0.0.1:1"], join_timeout=60)
    assert time.monotonic() - start < 20, "an engine that cannot be reached is told at once"
