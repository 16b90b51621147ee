"""Weights go out first, then both sides score; what differs too much ends the run."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.cluster.sync import SyncError, largest_difference, sync_weights

NAN = float("nan")


def sides(expected: list[float], by_engine: list[list[float]], urls: tuple[str, ...] = ("url",)) -> tuple[Any, Any]:
    """A trainer and a rollout that note the order of their calls in `trainer.order`."""
    order: list[str] = []

    def noting(name: str, answer: Any = None) -> Any:
        return lambda *args: (order.append(f"{name} {args}"), answer)[1]

    trainer = SimpleNamespace(order=order, push_weights=noting("push"), score=noting("score", expected))
    probe = noting("probe", by_engine)
    rollout = SimpleNamespace(
        engine_urls=list(urls), probe_ids=[5, 6, 7], probe_engines=probe, deaths_explained=nullcontext
    )
    return trainer, rollout


def test_weights_are_sent_and_then_compared() -> None:
    trainer, rollout = sides([-1.0, -2.0], [[-1.0, -2.25], [-1.125, -2.0]])
    assert sync_weights(trainer, rollout, 3, max_difference=0.5) == {"train/rollout_logprob_abs_diff": 0.25}
    assert trainer.order == ["push (['url'], '3')", "score ([5, 6, 7],)", "probe ()"]


@pytest.mark.parametrize("found", [-1.5, NAN])
def test_engines_that_compute_something_else_are_an_error(found: float) -> None:
    trainer, rollout = sides([-1.0, -2.0], [[-1.0, -2.0], [-1.0, found]])
    with pytest.raises(SyncError, match=r"after weight update 7 .* --max-logprob-diff 1\.00e-01.*--sglang-dtype"):
        sync_weights(trainer, rollout, 7, max_difference=0.1)
    assert "train/rollout_logprob_abs_diff" in sync_weights(trainer, rollout, 7, max_difference=None)


def test_a_supervised_run_has_nothing_to_sync() -> None:
    trainer, rollout = sides([], [], urls=())
    assert sync_weights(trainer, rollout, 1, max_difference=0.1) == {}
    assert trainer.order == []


@pytest.mark.parametrize("values", [[NAN, 0.0], [0.0, NAN]])
def test_a_value_that_is_no_number_is_not_lost_among_others(values: list[float]) -> None:
    difference = largest_difference([0.0, 0.0], [values])
    assert difference != difference
