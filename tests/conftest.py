"""What all tests share: tiny models, and one real SGLang server for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sleuth.engine.key import use_engine_key
from sleuth.engine.server import EngineConfig, EngineServer
from sleuth.weight_sync.tensor import push_weights
from tests.tiny_models import make_tiny_model

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is not a bug
hypothesis.settings.load_profile("untimed")


CONTEXT = 2048
"""Tokens of a sequence of the session's engine: as many as its model has positions."""
ENGINE_TIMEOUT = 900  # seconds; a server is up in 20, on a machine that is busy otherwise in minutes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT))


@dataclass(frozen=True)
class RunningEngine:
    """The session's engine, which serves `model` in float32."""

    server: EngineServer
    model_path: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def url(self) -> str:
        return self.server.url

    def log_probs(self, ids: list[int], temperature: float = 1.0, model: PreTrainedModel | None = None) -> list[float]:
        """What a plain float32 forward of Hugging Face says about ids[1:]."""
        with torch.no_grad():
            logits = (model or self.model)(torch.tensor([ids])).logits[0, :-1].float()
        return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def load_float32(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def session_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    folder = tmp_path_factory.mktemp("engine")
    path = make_tiny_model(folder / "model", "qwen2")
    use_engine_key("-a-key-that-begins-as-an-option-does")
    config = EngineConfig(path, dtype="float32", log_path=folder / "engine.log", context_length=CONTEXT)
    with EngineServer(config) as server:
        yield RunningEngine(server, path, load_float32(path), AutoTokenizer.from_pretrained(path))


@pytest.fixture
def engine(session_engine: RunningEngine) -> RunningEngine:
    """The session's engine with its first weights; a test may change them, the next one gets these again."""
    if not session_engine.server.is_alive():
        pytest.fail(f"an earlier test killed the engine:\n{session_engine.server.log_tail()}")
    push_weights([session_engine.url], session_engine.model.state_dict().items(), "initial")
    return session_engine
