"""Weights reach the real engine, and its log-probabilities become those of the new model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
from transformers import PreTrainedModel

from sleuth.engine.key import engine_session
from sleuth.hooks import Generation
from sleuth.rollout.engine_client import EngineClient
from sleuth.weight_sync.control import WeightSyncError
from sleuth.weight_sync.disk import load_weights_from_disk
from sleuth.weight_sync.tensor import push_weights
from tests.conftest import RunningEngine, load_float32
from tests.tiny_models import make_tiny_model

SHARED = Path("/dev/shm")
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other") / "model", "qwen2", seed=7)


@pytest.fixture(scope="module")
def other(other_path: Path) -> PreTrainedModel:
    return load_float32(other_path)


def ask(engine: RunningEngine) -> Generation:
    async def run() -> Generation:
        async with EngineClient([engine.url], max_concurrency=1, vocab_size=512) as client:
            return await client.generate(PROMPT, {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True})

    return asyncio.run(run())


def assert_serves(engine: RunningEngine, model: PreTrainedModel, version: str) -> None:
    generation = ask(engine)
    expected = engine.log_probs(PROMPT + generation.ids, model=model)[len(PROMPT) - 1 :]
    assert generation.log_probs == pytest.approx(expected, abs=1e-4)
    assert generation.weight_version == version


def is_paused(engine: RunningEngine) -> bool:
    """A paused engine answers no generation."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    try:
        engine_session().post(f"{engine.url}/generate", json=body, timeout=2.0)
    except requests.Timeout:
        return True
    return False


@pytest.mark.engine
class TestRealEngine:
    @pytest.mark.parametrize("in_band", [False, True])
    @pytest.mark.parametrize("bucket_bytes", [20_000, 2**28])
    def test_tensors(self, engine: RunningEngine, other: PreTrainedModel, bucket_bytes: int, in_band: bool) -> None:
        ask(engine)  # fills the prefix cache with keys and values of the old weights
        before = set(SHARED.glob("torch_*"))
        push_weights([engine.url], other.state_dict().items(), "5", bucket_bytes=bucket_bytes, in_band=in_band)
        assert_serves(engine, other, "5")
        assert set(SHARED.glob(f"torch_{os.getpid()}_*")) <= before, "a bucket was left in shared memory"

    def test_two_updates_in_turn(self, engine: RunningEngine, other: PreTrainedModel) -> None:
        push_weights([engine.url], other.state_dict().items(), "6")
        assert_serves(engine, other, "6")
        push_weights([engine.url], engine.model.state_dict().items(), "7")
        assert_serves(engine, engine.model, "7")

    def test_a_folder(self, engine: RunningEngine, other: PreTrainedModel, other_path: Path) -> None:
        ask(engine)
        load_weights_from_disk([engine.url], other_path, "8")
        assert_serves(engine, other, "8")

    def test_bfloat16_tensors_are_converted(self, engine: RunningEngine, other: PreTrainedModel) -> None:
        rounded = {name: tensor.bfloat16() for name, tensor in other.state_dict().items()}
        push_weights([engine.url], rounded.items(), "9")
        expected = load_float32_from(other, rounded)
        assert_serves(engine, expected, "9")

    @pytest.mark.parametrize("mode", ["abort", "retract"])
    def test_requests_under_way(self, engine: RunningEngine, other: PreTrainedModel, mode: str) -> None:
        async def run() -> Generation:
            params = {"temperature": 1.0, "max_new_tokens": 1000, "ignore_eos": True}
            async with EngineClient([engine.url], max_concurrency=1, vocab_size=512) as client:
                request = asyncio.create_task(client.generate(PROMPT, params))
                await asyncio.sleep(0.5)
                await asyncio.to_thread(push_weights, [engine.url], other.state_dict().items(), "10", mode=mode)
                return await request

        generation = asyncio.run(run())
        assert generation.finish_reason == ("abort" if mode == "abort" else "length")
        assert generation.weight_version == ("initial" if mode == "abort" else "10")
        assert_serves(engine, other, "10")

    def test_a_failure_before_any_weight_lets_the_engine_continue(self, engine: RunningEngine) -> None:
        with pytest.raises(WeightSyncError, match="continue with the old weights") as caught:
            push_weights([engine.url], [], "11")
        assert not caught.value.paused
        assert_serves(engine, engine.model, "initial")

    def test_a_failure_midway_leaves_the_engine_paused_and_says_so(
        self, engine: RunningEngine, other: PreTrainedModel
    ) -> None:
        tensors = list(other.state_dict().items())
        iterator = fail_after(tensors, 5)
        with pytest.raises(WeightSyncError, match="left PAUSED") as caught:
            push_weights([engine.url], iterator, "12", bucket_bytes=1)
        assert caught.value.paused
        assert is_paused(engine)
        push_weights([engine.url], tensors, "13")  # repeating the update repairs it
        assert_serves(engine, other, "13")

    def test_a_folder_without_a_model(self, engine: RunningEngine, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"no config\.json"):
            load_weights_from_disk([engine.url], tmp_path, "15")


def test_an_engine_that_is_gone() -> None:
    left = iter([("a", torch.ones(2)), ("b", torch.ones(2))])
    with pytest.raises(WeightSyncError, match="cannot be reached"):
        push_weights(["http://127.0.0.1:1"], left, "1")
    assert list(left) == [], "ranks that wait in the iterator's collectives must be let go"


def fail_after(tensors: list[tuple[str, torch.Tensor]], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors[:count]
    raise RuntimeError("the trainer failed")


def load_float32_from(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    copy = type(model)(model.config).eval()
    copy.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return copy
