"""The actor's methods pass on to its server; that Ray can make it remote is for the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from sleuth.engine.actor import EngineActor
from sleuth.engine.server import EngineConfig
from tests.tiny_models import make_tiny_model


@pytest.mark.engine
def test_an_actor_starts_and_restarts(tmp_path: Path) -> None:
    actor = EngineActor(EngineConfig(make_tiny_model(tmp_path / "model"), log_path=tmp_path / "engine.log"))
    try:
        url = actor.start()
        assert actor.url() == url
        assert actor.health()
        actor.release_memory()
        actor.resume_memory(("weights",))
        actor.resume_memory(("kv_cache",))
        assert actor.health()
        assert actor.restart() != url
        assert actor.health()
        assert actor.log_tail()
    finally:
        actor.stop()
    assert not actor.health()
