"""Metrics of a step's samples and of an evaluation: plain averages and counts, described in docs/metrics.md.

A number that a sample does not have is left out of the average, never counted as 0.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from sleuth.labels import is_blank
from sleuth.sample import Sample, SampleStatus, StopReason

UNKNOWN_SOURCE = "unknown"
SECONDS = "trajectory_seconds"
"""Under this name an evaluation notes in `Sample.rollout_metrics` how long the trajectory took."""
OVERLONG_SECONDS, OVERLONG_FACTOR = 30.0, 4.0
"""A trajectory that takes longer than this, and so many times the median, is told."""


def rollout_metrics(samples: Sequence[Sample], failed: Sequence[Sample] = ()) -> dict[str, float]:
    """The metrics `reward/...` and `rollout/...` of the samples that a step trains on.

    `failed` are samples that were replaced: they count only in the metrics on how trajectories ended, by status and by
    reason. Averages of rewards are over the samples that have a reward.
    """
    if not samples:
        return {"rollout/samples": 0.0}
    return {
        "rollout/samples": float(len(samples)),
        **_reward_metrics(samples),
        **_length_metrics(samples),
        **_ending_metrics(samples, failed),
        **_group_metrics(samples),
        **_averages("rollout/", samples, lambda sample: sample.rollout_metrics),
        **_version_metrics(samples),
    }


def _reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    metrics = _averages("reward/", samples, lambda sample: sample.reward_components)
    if rewards:
        metrics |= {
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
        }
    return metrics


def _length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [len(sample.trace.response_ids) for sample in samples]
    model_tokens = sum(_tokens_of(sample, "model") for sample in samples)
    return {
        "rollout/prompt_length/mean": statistics.fmean(len(sample.trace.prompt_ids) for sample in samples),
        "rollout/response_length/mean": statistics.fmean(lengths),
        "rollout/response_length/max": float(max(lengths)),
        "rollout/tokens": float(sum(lengths) + sum(len(sample.trace.prompt_ids) for sample in samples)),
        "rollout/model_tokens": float(model_tokens),
        "rollout/observation_tokens": float(sum(lengths) - model_tokens),
    }


def _tokens_of(sample: Sample, source: str) -> int:
    return sum(segment.end - segment.start for segment in sample.trace.segments if segment.source == source)


def _ending_metrics(samples: Sequence[Sample], failed: Sequence[Sample]) -> dict[str, float]:
    statuses = [sample.status for sample in (*samples, *failed)]
    reasons = [sample.stop_reason for sample in (*samples, *failed)]
    own = sorted({str(reason) for reason in reasons if reason is not None} - set(StopReason))  # of the hook
    return {
        "rollout/failed_samples": float(len(failed)),
        "rollout/truncated": statuses.count(SampleStatus.TRUNCATED) / len(samples),
        **{f"rollout/status/{status}": float(statuses.count(status)) for status in SampleStatus},
        **{f"rollout/stop/{reason}": reasons.count(reason) / len(reasons) for reason in [*StopReason, *own]},
    }


def _group_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            groups[sample.group_index].append(sample.reward)
    equal = sum(1 for rewards in groups.values() if len(rewards) > 1 and len(set(rewards)) == 1)
    firsts = list({sample.group_index: sample for sample in samples}.values())
    prompts = {tuple(sample.trace.prompt_ids) for sample in firsts}
    return {
        "rollout/groups": float(len(groups)),
        "rollout/zero_variance_groups": float(equal),
        **({"rollout/degenerate_group_rate": equal / len(groups)} if groups else {}),
        **_right_and_wrong_groups(samples),
        "rollout/repeated_prompts": float(len(firsts) - len(prompts)),
        "rollout/empty_labels": float(sum(is_blank(sample.label) for sample in firsts)),
    }


def _right_and_wrong_groups(samples: Sequence[Sample]) -> dict[str, float]:
    """Groups of which every sample, or none, has an exact match; nothing where the reward hook does not say."""
    groups: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if "exact_match" in sample.reward_components:
            groups[sample.group_index].append(sample.reward_components["exact_match"])
    if not groups:
        return {}
    return {
        "rollout/groups_all_right": float(sum(all(matches) for matches in groups.values())),
        "rollout/groups_all_wrong": float(sum(not any(matches) for matches in groups.values())),
    }


def _version_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    texts = [sample.weight_version or "" for sample in samples]
    versions = [int(text) for text in texts if text.isdecimal()]
    if not versions:
        return {}
    return {"rollout/weight_version/min": float(min(versions)), "rollout/weight_version/max": float(max(versions))}


def _averages(
    prefix: str, samples: Iterable[Sample], values_of: Callable[[Sample], dict[str, float]]
) -> dict[str, float]:
    """The mean of every named value over the samples that carry it."""
    collected: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in values_of(sample).items():
            collected[name].append(float(value))
    return {prefix + name: statistics.fmean(values) for name, values in sorted(collected.items())}


def evaluation_name(data_set: str, temperature: float) -> str:
    """The name under which an evaluation is logged: `demo/greedy` for (`demo`, 0.0), `demo/t1.0` for (`demo`, 1.0)."""
    return f"{data_set}/greedy" if temperature == 0 else f"{data_set}/t{float(temperature)}"


def evaluation_metrics(samples: Sequence[Sample], name: str, failed: Sequence[Sample] = ()) -> dict[str, float]:
    """The metrics `eval/<name>/...` of one evaluation's scored samples: over all, per data source, and macro.

    `failed`: trajectories that a hook, search or engine failed; they say nothing about the model, were generated anew,
    and count only as `failed`. `macro` is the mean over data sources.
    """
    metrics = {"questions": float(len(samples)), "failed": float(len(failed)), **_evaluation_averages(samples)}
    by_source: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_source[data_source(sample)].append(sample)
    sources = {source: _evaluation_averages(members) for source, members in sorted(by_source.items())}
    for source, averages in sources.items():
        metrics |= {f"source/{source}/{key}": value for key, value in averages.items()}
        metrics[f"source/{source}/questions"] = float(len(by_source[source]))
    metrics |= _macro(list(sources.values()))
    if times := [sample.rollout_metrics[SECONDS] for sample in samples if SECONDS in sample.rollout_metrics]:
        metrics["seconds_max"] = max(times)
    return {f"eval/{name}/{key}": value for key, value in metrics.items()}


def data_source(sample: Sample) -> str:
    """The data set of a sample's question; slashes, which separate the parts of a metric's name, become dashes."""
    return str(sample.metadata.get("data_source") or UNKNOWN_SOURCE).replace("/", "-")


_REPORTED_NAMES = {"searches": "searches", "seconds": SECONDS}
_COMPONENT_NAMES = {"exact_match": "em", "valid_format": "format", "retrieval_hit": "retrieval_hit"}


def _evaluation_averages(samples: Sequence[Sample]) -> dict[str, float]:
    return _averages("", samples, evaluation_values)


def evaluation_values(sample: Sample) -> dict[str, float]:
    """What an evaluation averages of one scored sample: `em`, `format`, `searches`, `reward`, and the like."""
    values = {_COMPONENT_NAMES.get(name, name): value for name, value in sample.reward_components.items()}
    for name, reported in _REPORTED_NAMES.items():
        if reported in sample.rollout_metrics:
            values[name] = sample.rollout_metrics[reported]
    if sample.reward is not None:
        values["reward"] = sample.reward
    return values | {
        "response_length": float(len(sample.trace.response_ids)),
        "truncated": float(sample.status == SampleStatus.TRUNCATED),
    }


def overlong_wait(samples: Sequence[Sample]) -> str | None:
    """A sentence about the slowest trajectory and where its time went, if it took far longer than the others."""
    timed = [sample for sample in samples if SECONDS in sample.rollout_metrics]
    if not timed:
        return None
    slowest = max(timed, key=lambda sample: sample.rollout_metrics[SECONDS])
    seconds = slowest.rollout_metrics[SECONDS]
    median = statistics.median(sample.rollout_metrics[SECONDS] for sample in timed)
    if seconds < OVERLONG_SECONDS or seconds < OVERLONG_FACTOR * median:
        return None
    parts = {"searches": "search_seconds", "the engine": "generation_seconds"}
    waits = [
        f"{slowest.rollout_metrics[name]:.1f} s for {what}"
        for what, name in parts.items()
        if name in slowest.rollout_metrics
    ]
    waited = f", of which it waited {' and '.join(waits)}" if waits else ""
    return (
        f"the slowest of {len(timed)} trajectories, {slowest.where}, took {seconds:.1f} s{waited}; the median took "
        f"{median:.1f} s"
    )


def _macro(sources: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for averages in sources for name in averages})
    return {
        f"macro/{name}": statistics.fmean(averages[name] for averages in sources if name in averages) for name in names
    }
