"""The rollout side of a run, as far as it needs no engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.arguments import parse_args
from sleuth.hooks import FailSample
from sleuth.rollout.manager import PROBE_TOKENS, RolloutManager
from sleuth.sample import Sample, SampleStatus, StopReason

DEMO = Path(__file__).parents[2] / "data/demo"


@pytest.mark.parametrize("length", [1, 2, PROBE_TOKENS + 1])
def test_a_probe_has_a_token_to_compare_whatever_the_first_prompt(length: int):
    prompt: Any = SimpleNamespace(prompt_ids=list(range(5, 5 + length)))
    manager: Any = SimpleNamespace(rows=[prompt])
    ids = RolloutManager.probe_ids(manager)
    assert 2 <= len(ids) <= PROBE_TOKENS
    assert set(ids) <= set(prompt.prompt_ids)


attempts: dict[int, int] = {}
"""How often the hook below was called for each sample of an evaluation."""


async def flaky(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Fails at the first attempt of every even sample, and at the second of every fourth."""
    assert evaluation
    attempts[sample.index] = attempt = attempts.get(sample.index, 0) + 1
    if sample.index % (2 * attempt) == 0 and attempt <= 2:
        raise FailSample(StopReason.SEARCH_FAILED, "the backend is away")
    sample.trace.append_model([5, 6], [-0.1, -0.2])
    sample.status, sample.stop_reason = SampleStatus.COMPLETED, StopReason.ANSWERED
    return sample


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    return 1.0


def test_an_evaluation_counts_the_trajectories_that_failed(tmp_path: Path):
    here = "tests.rollout.test_manager"
    args = parse_args(
        [
            *("--hf-checkpoint", str(DEMO / "model"), "--prompt-data", f"{DEMO / 'train.parquet'}@[0:2]", "--colocate"),
            *("--apply-chat-template", "--eval-interval", "1", "--max-failure-rate", "1"),
            *("--eval-prompt-data", "a_b", f"{DEMO / 'test.parquet'}@[0:8]", "a.b", f"{DEMO / 'test.parquet'}@[0:1]"),
            *("--custom-generate-function-path", f"{here}.flaky", "--custom-rm-path", f"{here}.reward"),
        ]
    )
    manager = RolloutManager(args, tmp_path)
    manager.connect(["http://127.0.0.1:9"], {})  # the hook asks no engine
    attempts.clear()
    metrics = manager.evaluate(3)
    assert metrics["eval/a_b/greedy/questions"] == 8
    assert metrics["eval/a_b/greedy/failed"] == 4 + 2  # of eight, every second once, every fourth once more
    assert metrics["eval/a_b/greedy/reward"] == 1.0
    assert 0 < metrics["eval/a_b/greedy/seconds"] <= metrics["eval/a_b/greedy/seconds_max"]
    names = sorted(path.name for path in (tmp_path / "trajectories").glob("*.jsonl"))
    assert names == ["eval_0000003_a.b_greedy.jsonl", "eval_0000003_a_b_greedy.jsonl"]
