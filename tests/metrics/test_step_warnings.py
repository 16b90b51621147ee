"""A step that cannot teach anything is told, once, as long as it goes on so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sleuth.metrics.rollout_metrics import rollout_metrics
from sleuth.metrics.step_warnings import step_warnings
from sleuth.metrics.tracker import Tracker
from sleuth.sample import Sample
from tests.metrics.samples import make_sample
from tests.metrics.test_tracker import TrackerSettings


def step(*rewards: tuple[float, float], label: object = "Ann", apart: bool = True) -> list[Sample]:
    """Groups of two with these rewards; prompts of their own where `apart`."""
    samples = []
    for group, pair in enumerate(rewards):
        for reward in pair:
            sample = make_sample(group=group, reward=reward, label=label)
            sample.trace.prompt_ids = [1, 2, group if apart else 0]
            samples.append(sample)
    return samples


@pytest.mark.parametrize(
    ("samples", "signs"),
    [
        (step((0.0, 1.0), (0.0, 0.0)), {}),
        (step((0.2, 0.2), (0.2, 0.2)), {"constant reward": "every reward is 0.2"}),
        (step((0.0, 0.0), (1.0, 1.0)), {"no signal": "in each of the 2 groups all rewards are equal"}),
        (step((0.0, 1.0), label={"target": []}), {"empty labels": "1 of 1 prompts have a label without an answer"}),
        (
            step((0, 1), (0, 1), (0, 1), apart=False),
            {"repeated prompts": "2 of 3 prompts came before in the same step"},
        ),
        ([], {}),
    ],
)
def test_signs_of_a_step(samples: list[Sample], signs: dict[str, str]) -> None:
    found = step_warnings(rollout_metrics(samples))
    assert found.keys() == signs.keys()
    assert all(words in found[name] for name, words in signs.items())


def test_a_sign_is_told_when_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    constant, good = rollout_metrics(step((0.2, 0.2), (0.2, 0.2))), rollout_metrics(step((0.0, 1.0)))
    with caplog.at_level(logging.WARNING), Tracker(TrackerSettings(), tmp_path) as tracker:
        for number, metrics in enumerate((constant, constant, good, constant), start=1):
            tracker.log(number, metrics)
            tracker.log(number, {"time/save": 1.0})
    assert [text[:7] for text in caplog.messages if "every reward is 0.2" in text] == ["step 1:", "step 4:"]
