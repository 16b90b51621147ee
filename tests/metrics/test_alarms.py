"""Each alarm on a course that shows its trouble, on the same course made harmless, and in the log of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from sleuth.metrics.alarms import ALARMS, LONG, WATCHED, WINDOW, alarms, watched
from sleuth.metrics.tracker import Tracker
from tests.metrics.test_tracker import TrackerSettings

LATER = 4 * WINDOW


def course(**ends: tuple[float, float]) -> list[dict[str, float]]:
    """Steps in which each metric (`__` stands for `/`) goes in a straight line from one value to another."""
    steps = max(2 * LONG, LATER)
    names = {key: key.replace("__", "/") for key in ends}
    return [
        {names[key]: start + (end - start) * step / (steps - 1) for key, (start, end) in ends.items()}
        for step in range(steps)
    ]


CASES = {
    "reward without exact match": (
        course(reward__mean=(0.1, 0.5), reward__exact_match=(0.1, 0.1)),
        course(reward__mean=(0.1, 0.5), reward__exact_match=(0.1, 0.4)),
        "the mean reward rose by 0.21",
    ),
    "format collapse": (
        course(reward__valid_format=(0.9, 0.4)),
        course(reward__valid_format=(0.4, 0.9)),
        "valid format fell from 0.87 to",
    ),
    "entropy collapse": (
        course(train__entropy=(0.4, 0.0001)),
        course(train__entropy=(0.4, 0.06)),
        "entropy fell from",
    ),
    "search failing": (
        course(search__success_rate=(1.0, 0.7)),
        course(search__success_rate=(1.0, 0.95)),
        "the share of searches that are answered fell from",
    ),
    "log-probability difference": (
        course(train__train_rollout_logprob_abs_diff=(0.01, 0.08)),
        course(train__train_rollout_logprob_abs_diff=(0.001, 0.015)),
        "the log-probabilities of engine and trainer differ by 0.07",
    ),
    "length at limit": (
        course(rollout__stop__response_limit=(0.0, 0.3), rollout__stop__context_limit=(0.0, 0.2)),
        course(rollout__stop__response_limit=(0.5, 0.1), rollout__stop__context_limit=(0.0, 0.0)),
        "of the responses end at the limit of tokens",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_alarm_is_raised_where_it_should_be_and_not_elsewhere(name: str) -> None:
    trouble, harmless, words = CASES[name]
    found = alarms(trouble)
    assert list(found) == [name]
    assert words in found[name]
    assert alarms(harmless) == {}


def test_every_alarm_has_a_case_and_every_watched_metric_is_used() -> None:
    assert CASES.keys() == ALARMS.keys()
    assert {name for trouble, _, _ in CASES.values() for name in trouble[0]} == set(WATCHED)


@pytest.mark.parametrize("name", CASES)
def test_a_young_run_raises_no_alarm(name: str) -> None:
    trouble = CASES[name][0]
    assert alarms([]) == alarms(trouble[: WINDOW - 1]) == {}


def test_one_bad_step_raises_no_alarm() -> None:
    good, bad = {"reward/valid_format": 0.9}, {"reward/valid_format": 0.1}
    assert alarms([good] * LATER + [bad]) == {}
    assert set(alarms([good] * LATER + [bad] * 2)) == {"format collapse"}


def test_what_is_no_number_is_left_out() -> None:
    line = {"step": 3, "reward/mean": None, "reward/exact_match": 0.5, "train/entropy": float("nan")}
    assert set(watched(line)) == {"reward/exact_match", "train/entropy"}
    assert alarms([watched(line)] * LATER) == {}


def test_a_run_logs_an_alarm_once_also_where_it_was_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = [{"rollout/samples": 4.0, **step} for step in CASES["format collapse"][0]]
    half = len(steps) // 4
    with caplog.at_level(logging.WARNING), Tracker(TrackerSettings(), tmp_path) as tracker:
        for number, metrics in enumerate(steps[:half], start=1):
            tracker.log(number, metrics)
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING), Tracker(TrackerSettings(), tmp_path, first_step=half + 1) as tracker:
        for number, metrics in enumerate(steps[half:], start=half + 1):
            tracker.log(number, metrics)
            tracker.log(number, {"time/save": 1.0})
    told = [text for text in caplog.messages if "valid format fell" in text]
    assert len(told) == len(caplog.messages) == 1
    assert "from 0.87" in told[0]  # the best of the steps before the resumption


def test_a_whole_history_is_read_from_the_lines_of_a_file(tmp_path: Path) -> None:
    lines = [json.dumps({"step": i, **step}) for i, step in enumerate(CASES["entropy collapse"][0], start=1)]
    assert set(alarms([watched(json.loads(line)) for line in lines])) == {"entropy collapse"}
