"""The whole loop as a user starts it: `train.py` in a process of its own, with a retrieval server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, retriever, search_config

MODEL = ROOT / "data/demo/model"


@pytest.fixture(scope="session")
def search_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A BM25 server over the demo's corpus."""
    with retriever(tmp_path_factory.mktemp("retriever")) as url:
        yield url


@pytest.fixture
def flags(tmp_path: Path, search_url: str) -> list[str]:
    """A small run on the demo's data; results under `tmp_path / "run"`, checkpoints under `tmp_path / "save"`."""
    config = tmp_path / "search.yaml"
    config.write_text(search_config(search_url))
    return [
        *("--hf-checkpoint", str(MODEL), "--prompt-data", "data/demo/train.parquet", "--apply-chat-template"),
        *("--custom-config-path", str(config), "--custom-rm-path", "generate_with_search.reward_func"),
        *("--custom-generate-function-path", "generate_with_search.generate"),
        # The shipped model seldom searches: with 8 samples a prompt it is next to sure that some do and rewards differ.
        *("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "8"),
        *("--global-batch-size", "32"),
        *("--rollout-max-response-len", "48", "--rollout-max-context-len", "512", "--rollout-shuffle", "--colocate"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--lr", "1e-4", "--max-logprob-diff", "1e-4"),
        *("--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "save"), "--save-interval", "1"),
    ]
