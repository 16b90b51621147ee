"""Weights from a trainer in four processes, a mixture of experts, to two real engines of two ranks each.

Tensor, pipeline and expert parallel at once: no process of the trainer has all weights, no process of an engine either.
After each update every engine must score a few tokens as the trainer does, whose weights are others each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sleuth.cluster import push as cluster_push
from sleuth.cluster.push import WeightPush
from sleuth.cluster.sync import largest_difference
from sleuth.engine.key import engine_session
from sleuth.engine.server import EngineConfig, EngineServer
from sleuth.weight_sync import broadcast
from sleuth.weight_sync import tensor as tensor_way
from sleuth.weight_sync.distributed import BroadcastGroup
from sleuth.weight_sync.expected import check_weights
from sleuth.weight_sync.ranks import Ranks
from sleuth.weight_sync.sources import Source
from tests.megatron.harness import Task, make_args, new_trainer, run_tasks
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.megatron]

IDS = list(range(5, 60))
WORLD = 4
LAYOUT = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
}
ALIKE = [Source((0, 1)), Source((2, 3))]
CROSSED = [Source((3, 3)), Source((0, 2))]
"""One rank serves both ranks of an engine; the other engine's are served by both stages."""
SMALL = 40_000
NATS = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "moe", "qwen3_moe")


@pytest.fixture(scope="module")
def urls(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    logs = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # else SGLang wants a NUMA node for each rank
        configs = [
            EngineConfig(model, dtype="float32", log_path=logs / f"{i}.log", extra_args=("--tp-size", "2"))
            for i in range(2)
        ]
        servers = [EngineServer(config) for config in configs]
        try:
            with ThreadPoolExecutor() as pool:
                yield list(pool.map(EngineServer.start, servers))
        finally:
            for server in servers:
                server.stop()


def ask(url: str) -> tuple[list[float], str]:
    """The engine's log-probabilities of IDS after the first, and the version of its weights."""
    params = {"temperature": 1.0, "max_new_tokens": 1}
    body = {"input_ids": IDS, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    meta = engine_session().post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][1:]], meta["weight_version"]


class Run:
    """A rank of the trainer, and what it found: for each update the largest difference and the engines' versions."""

    def __init__(self, rank: int, folder: Path, urls: list[str]) -> None:
        self.rank, self.urls = rank, urls
        self.trainer = new_trainer(make_args(folder, WORLD, **LAYOUT))
        self.ranks = Ranks.of_trainer()
        self.found: dict[str, Any] = {}

    def change_weights(self) -> None:
        with torch.no_grad():
            for entry in self.trainer.weights.entries:
                entry.parameter.mul_(0.9)

    def compare(self, version: str) -> None:
        expected = self.trainer.log_probs(IDS, 1.0)
        if self.rank == 0:
            answers = [ask(url) for url in self.urls]
            difference = largest_difference(expected, [values for values, _ in answers])
            self.found[version] = (difference, [found for _, found in answers])
        torch.distributed.barrier()

    def by_tensor(self, version: str, sources: list[Source], **options: Any) -> None:
        weights = self.trainer.hf_weights()
        options = {"bucket_bytes": SMALL, "sources": sources, "ranks": self.ranks} | options
        tensor_way.push_weights(self.urls, weights, version, **options)

    def fails(self, version: str, sources: list[Source]) -> None:
        try:
            self.by_tensor(version, sources)
        except Exception as error:
            self.found[version] = f"{type(error).__name__}: {error}"


def corrupted(bucket: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """The bucket's bytes, of which one is not as sent: the exponent of a number in the middle."""
    flat = FLATTEN(bucket, out)
    flat[flat.numel() // 8 * 4 + 3] ^= 0x7F
    return flat


FLATTEN = tensor_way.flatten


def broken(bucket: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    raise OSError("no room")


def updates(rank: int, world: int, folder: Path, urls: list[str]) -> dict[str, Any]:
    run = Run(rank, folder, urls)
    described = run.trainer.described_weights()
    run.found["described"] = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in described.items()]
    run.found["whole"] = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in run.trainer.hf_weights()]
    run.found["stage"] = [name for name, _ in run.trainer.stage_weights()]
    if rank == 0:
        check_weights(urls, described)
    for version, sources in (("alike", ALIKE), ("crossed", CROSSED)):
        run.change_weights()
        run.by_tensor(version, sources)
        run.compare(version)

    run.change_weights()
    group = BroadcastGroup(urls, stage=run.trainer.stage, ranks=run.ranks, tensor_parallel_size=2)
    run.found["sender"] = group.name is not None
    group.push(run.trainer.stage_weights(), "broadcast", bucket_bytes=SMALL)
    run.compare("broadcast")
    run.change_weights()
    broadcast.APART_BYTES = 1  # as for large tensors
    group.push(run.trainer.stage_weights(), "apart", bucket_bytes=SMALL)
    run.compare("apart")
    group.close()

    run.change_weights()
    run.by_tensor("in band", ALIKE, in_band=True)
    run.compare("in band")

    tensor_way.flatten = corrupted if rank == 2 else FLATTEN
    run.by_tensor("corrupted", ALIKE)
    run.compare("corrupted")

    tensor_way.flatten = broken if rank == 3 else FLATTEN
    run.fails("broken", ALIKE)
    tensor_way.flatten = FLATTEN
    run.by_tensor("repaired", ALIKE)
    run.compare("repaired")

    run.change_weights()
    args = run.trainer.args.model_copy(update={"update_weights_through": "disk"})
    cluster_push.SHARD_BYTES = SMALL
    WeightPush(args, folder.parent / "run", run.trainer, ALIKE).push(urls, "disk")
    run.compare("disk")

    run.urls = [urls[0], "http://127.0.0.1:1"]
    run.fails("gone", ALIKE)
    run.urls = urls
    return run.found


@pytest.fixture(scope="module")
def found(model: Path, urls: list[str]) -> list[dict[str, Any]]:
    """What each rank found."""
    return run_tasks(WORLD, [Task(updates, {"folder": model, "urls": urls})])[0]


@pytest.mark.parametrize("version", ["alike", "crossed", "broadcast", "apart", "in band", "repaired", "disk"])
def test_every_engine_computes_what_the_trainer_does(found: list[dict[str, Any]], version: str) -> None:
    difference, versions = found[0][version]
    assert versions == [version, version]
    assert difference < NATS


def test_the_folder_is_written_a_shard_at_a_time(found: list[dict[str, Any]], model: Path) -> None:
    files = list((model.parent / "run/weights").glob("*.safetensors"))
    whole = sum(tensor.stat().st_size for tensor in model.glob("*.safetensors"))
    assert len(files) > whole / SMALL / 4
    assert max(path.stat().st_size for path in files) < whole / 4


def test_the_probe_finds_a_byte_that_arrived_otherwise(found: list[dict[str, Any]]) -> None:
    difference, _ = found[0]["corrupted"]
    assert not difference < 100 * NATS


def test_sglangs_checksums_still_need_cuda(urls: list[str]) -> None:
    """If this fails, they can be compared after every update."""
    answer = engine_session().post(f"{urls[0]}/weights_checker", json={"action": "checksum"}, timeout=60).json()
    assert answer["success"] or "CUDA" in answer["message"]
    assert answer["success"] == torch.cuda.is_available()


def test_what_fails_on_one_rank_is_told_on_all(found: list[dict[str, Any]]) -> None:
    told = [rank["broken"] for rank in found]
    assert told[3] == "OSError: no room"
    assert told[1] == told[2] == "WeightSyncError: trainer rank 3: OSError: no room"
    assert "trainer rank 3: OSError: no room. The engines" in told[0]


def test_engines_that_are_gone_are_told_on_all(found: list[dict[str, Any]]) -> None:
    assert all("127.0.0.1:1/pause_generation cannot be reached" in rank["gone"] for rank in found)


def test_each_stage_sends_its_own_weights(found: list[dict[str, Any]]) -> None:
    first, second = found[0]["stage"], found[2]["stage"]
    assert not set(first) & set(second)
    assert {name for name, _, _ in found[0]["whole"]} == {*first, *second}
    assert any(".experts.3." in name for name in second)
    assert [rank["sender"] for rank in found] == [True, False, True, False]


def test_the_weights_are_described_as_they_are_sent(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert sorted(rank["described"]) == sorted(rank["whole"])
        assert len(rank["whole"]) == len({name for name, _, _ in rank["whole"]})


def test_weights_that_an_engine_does_not_have_are_named(found: list[dict[str, Any]], urls: list[str]) -> None:
    described = {name: torch.empty(shape, device="meta") for name, shape, _ in found[0]["described"]}
    described["model.extra.weight"] = described.pop("model.norm.weight")
    described["model.embed_tokens.weight"] = torch.empty(3, 4, device="meta")
    with pytest.raises(ValueError, match="nothing was sent") as caught:
        check_weights(urls, described)
    assert "would not be sent: model.norm.weight" in str(caught.value)
    assert "has no place there: model.extra.weight" in str(caught.value)
    assert "model.embed_tokens.weight is [3, 4], expected" in str(caught.value)
