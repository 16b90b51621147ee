"""The engines' side of a run, as far as it needs no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sleuth.cluster.rollout_group import lent_memory


def test_engines_keep_weights_that_the_next_sync_may_not_bring_back() -> None:
    args: Any = SimpleNamespace(update_weights_interval=1)
    assert lent_memory(args) is None
    args.update_weights_interval = 2
    assert lent_memory(args) == ("kv_cache", "cuda_graph")
