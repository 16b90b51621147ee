"""What the metrics of many steps say is going wrong: pure functions over their history, one sentence for each alarm.

    alarms([{"reward/mean": 0.1, ...}, {"reward/mean": 0.2, ...}])      the steps in order; {} where all is well

Means over WINDOW steps are looked at, so that the noise of single steps raises no alarm. Where they are compared with
those before, none is raised before there are two windows. `step_warnings` looks at a single step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

History = Sequence[Mapping[str, float]]
Alarm = Callable[[History], str | None]

WINDOW = 5
"""Steps of a mean."""
LONG = 20
"""Steps over which reward and exact match are compared: exact match moves slowly."""
REWARD_RISE = 0.1
"""How far the mean reward must have risen for a flat exact match to be told."""
EM_SHARE = 0.1
"""Exact match is flat where it rose by less than this share of the reward's rise."""
FORMAT_FALL = 0.2
"""How far the share of valid format may fall below its best."""
ENTROPY_SHARE = 0.1
"""The share of its first value below which the entropy has collapsed."""
ENTROPY_NATS = 0.05
"""Nats above which no entropy counts as collapsed."""
SEARCH_FALL = 0.1
"""How far the share of answered searches may fall below its best."""
LOGPROB_FACTOR = 2.0
"""The multiple of its lowest value above which the log-probability difference has risen."""
LOGPROB_NATS = 0.02
"""Nats up to which a log-probability difference is of no concern (bfloat16 alone makes about 0.01)."""
AT_LIMIT = 0.25
"""Share of responses that a limit of tokens cut, above which that is told."""


def reward_without_em(history: History) -> str | None:
    """The reward rises, exact match does not: something else in the reward is learned."""
    reward, em = (_values(history, name)[-2 * LONG :] for name in ("reward/mean", "reward/exact_match"))
    if len(reward) < 2 * LONG or len(em) < 2 * LONG:
        return None
    gained, learned = (statistics.fmean(v[LONG:]) - statistics.fmean(v[:LONG]) for v in (reward, em))
    if gained < REWARD_RISE or learned >= EM_SHARE * gained:
        return None
    return (
        f"the mean reward rose by {gained:.2f} in {2 * LONG} steps, exact match by {learned:.2f}: the model learns "
        "something else that the reward pays for; read trajectories with a high reward and a wrong answer"
    )


def format_collapse(history: History) -> str | None:
    """The share of trajectories in valid format falls."""
    found = _latest_and_windows(history, "reward/valid_format")
    if found is None or found[0] > max(found[1]) - FORMAT_FALL:
        return None
    return (
        f"valid format fell from {max(found[1]):.2f} to {found[0]:.2f}: lower --lr, or raise --kl-loss-coef; "
        "`invalid_reason` in trajectories/ says what is wrong"
    )


def entropy_collapse(history: History) -> str | None:
    """The policy has become nearly deterministic, so that samples of a group no longer differ."""
    found = _latest_and_windows(history, "train/entropy")
    if found is None or found[0] >= min(ENTROPY_NATS, ENTROPY_SHARE * found[1][0]):
        return None
    return (
        f"entropy fell from {found[1][0]:.3f} to {found[0]:.4f} nats: samples of a group hardly differ any more; lower "
        "--lr, raise --eps-clip-high or --entropy-coef, or stop here if exact match is what you want"
    )


def search_failing(history: History) -> str | None:
    """Fewer searches are answered than before."""
    found = _latest_and_windows(history, "search/success_rate")
    if found is None or found[0] > max(found[1]) - SEARCH_FALL:
        return None
    return (
        f"the share of searches that are answered fell from {max(found[1]):.2f} to {found[0]:.2f}: look at "
        "search/*_rate and at the retrieval server's log"
    )


def logprob_difference(history: History) -> str | None:
    """Engine and trainer disagree more and more about the same tokens."""
    found = _latest_and_windows(history, "train/train_rollout_logprob_abs_diff")
    if found is None or found[0] <= max(LOGPROB_NATS, LOGPROB_FACTOR * min(found[1])):
        return None
    return (
        f"the log-probabilities of engine and trainer differ by {found[0]:.3f} nats, {min(found[1]):.3f} before: "
        "look at train/rollout_logprob_abs_diff (the weights), and correct for it with --use-tis or mis.py"
    )


def length_at_limit(history: History) -> str | None:
    """Many responses are cut."""
    names = ("rollout/stop/response_limit", "rollout/stop/context_limit")
    shares = [sum(step.get(name, 0.0) for name in names) for step in history if any(name in step for name in names)]
    if len(shares) < WINDOW or (share := statistics.fmean(shares[-WINDOW:])) < AT_LIMIT:
        return None
    return (
        f"{share:.0%} of the responses end at the limit of tokens: raise --rollout-max-response-len or "
        "--rollout-max-context-len, or make long answers cost something (--overlong-buffer-len)"
    )


ALARMS: dict[str, Alarm] = {
    "reward without exact match": reward_without_em,
    "format collapse": format_collapse,
    "entropy collapse": entropy_collapse,
    "search failing": search_failing,
    "log-probability difference": logprob_difference,
    "length at limit": length_at_limit,
}
WATCHED = (
    *("reward/mean", "reward/exact_match", "reward/valid_format", "train/entropy", "search/success_rate"),
    *("train/train_rollout_logprob_abs_diff", "rollout/stop/response_limit", "rollout/stop/context_limit"),
)
"""The metrics that the alarms read."""


def alarms(history: History) -> dict[str, str]:
    """The alarms after the last step of `history`, by name: what is seen, and what to do about it."""
    found = {name: alarm(history) for name, alarm in ALARMS.items()}
    return {name: text for name, text in found.items() if text is not None}


def watched(metrics: Mapping[str, float]) -> dict[str, float]:
    """The part of a step's metrics that the alarms read, without what is no number."""
    return {name: float(metrics[name]) for name in WATCHED if isinstance(metrics.get(name), int | float)}


def _values(history: History, name: str) -> list[float]:
    """The metric at the steps that have it as a finite number."""
    return [step[name] for step in history if name in step and abs(step[name]) < float("inf")]


def _latest_and_windows(history: History, name: str) -> tuple[float, list[float]] | None:
    """The mean of the last WINDOW values, and the means of the whole windows before them; None if there are none."""
    values = _values(history, name)
    before = values[:-WINDOW]
    starts = range(0, len(before) - WINDOW + 1, WINDOW)
    windows = [statistics.fmean(before[start : start + WINDOW]) for start in starts]
    return (statistics.fmean(values[-WINDOW:]), windows) if windows else None
