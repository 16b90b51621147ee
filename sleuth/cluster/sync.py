"""Sends the trainer's weights to every engine, and checks that both then compute the same."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from sleuth.cluster.rollout_group import RolloutGroup
from sleuth.cluster.train_group import TrainGroup


class SyncError(RuntimeError):
    """The engines' log-probabilities differ too much from the trainer's."""


def sync_weights(
    trainer: TrainGroup, rollout: RolloutGroup, version: int, *, max_difference: float | None
) -> dict[str, float]:
    """Send the trainer's weights to the engines as `version`, then have both score the same few tokens (the probe).

    Returns as a metric the largest difference of log-probabilities over the probe, in nats. Raises SyncError if it
    exceeds `max_difference` (None: never). Without engines it does nothing and returns no metric.
    """
    if not rollout.engine_urls:
        return {}
    with rollout.deaths_explained():
        while (difference := _push_and_compare(trainer, rollout, version)) is None:
            pass
    if max_difference is not None and not difference <= max_difference:  # also true for NaN
        raise SyncError(
            f"after weight update {version} an engine's log-probabilities differ from the trainer's by "
            f"{difference:.2e} nats; expected at most --max-logprob-diff {max_difference:.2e}. "
            "The engine holds other weights, or computes in another precision (--sglang-dtype)"
        )
    return {"train/rollout_logprob_abs_diff": difference}


def _push_and_compare(trainer: TrainGroup, rollout: RolloutGroup, version: int) -> float | None:
    """The largest difference over the probe; None if an engine was lost, and is there again: all is to be repeated."""
    try:
        trainer.push_weights(rollout.engine_urls, str(version))
        expected = trainer.score(rollout.probe_ids)
        return largest_difference(expected, rollout.probe_engines())
    except ray.exceptions.RayError:
        if rollout.revive(with_weights=False):
            return None
        raise


def largest_difference(expected: Sequence[float], by_engine: Sequence[Sequence[float]]) -> float:
    """The largest |found - expected| over all engines and tokens; NaN if any is."""
    differences = [abs(found - wanted) for engine in by_engine for found, wanted in zip(engine, expected, strict=True)]
    return next((value for value in differences if value != value), max(differences))
