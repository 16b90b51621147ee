"""What is told of a rollout that hangs, and how a hook that blocks the event loop is ended."""

from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.activity import waiting_for
from sleuth.metrics.progress import Tally
from sleuth.rollout import watch
from sleuth.rollout.hook_runner import HookRunner, Hooks
from sleuth.rollout.loop import GenerationLoop
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace


async def answer(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.trace.append_model([1, 2], [-0.5, -0.25])
    return sample.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)


async def one(args: Any, sample: Sample, **_: Any) -> float:
    return 1.0


def run(generate: Any = answer, reward: Any = one, *, samples: int = 2, hook_timeout: float = 60.0) -> list[Sample]:
    """The samples of a step 3, all at once."""
    args: Any = SimpleNamespace(hook_timeout=hook_timeout, rollout_max_context_len=None)
    runner = HookRunner(args, Hooks(generate, reward))

    async def go() -> list[Sample]:
        made = [Sample(i, 0, "a", TokenTrace([1]), None, file="questions.jsonl", row=i) for i in range(samples)]
        with runner.watching("step 3", samples):
            return await asyncio.gather(*(runner.run(sample, {}, False) for sample in made))

    return asyncio.run(go())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(watch, "TELL_SECONDS", 0.1)
    monkeypatch.setattr(watch, "BLOCKED_SECONDS", 30.0)


async def ask_the_judge() -> None:
    await asyncio.sleep(1.0)


def test_a_line_says_how_far_a_step_is_and_what_the_oldest_trajectory_waits_for(caplog: Any) -> None:
    async def search(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        if sample.index == 1:
            with waiting_for("search at http://here/retrieve"):
                await ask_the_judge()
        return await answer(args, sample, sampling_params)

    run(search)
    first, second, *_ = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        r"step 3: no trajectory has finished for 0 s; oldest: search at http://here/retrieve for 0 s, sample 1 "
        r"\(row 1 of questions\.jsonl\), in its generate hook for 0 s, at test_watch\.py:\d+ in ask_the_judge",
        first,
    )
    assert second.startswith("step 3: no trajectory")


def test_it_reports_how_far_it_is() -> None:
    failed = set[int]()

    async def flaky(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        if sample.index == 0 and not failed:
            failed.add(0)
            raise ValueError("for once")
        if sample.index == 1:
            sample.trace.append_model([1], [-0.5])
            await asyncio.sleep(0.2)
        return await answer(args, sample, sampling_params)

    reported: list[Tally] = []
    args: Any = SimpleNamespace(
        hook_timeout=60.0,
        rollout_max_context_len=None,
        n_samples_per_eval_prompt=3,
        max_failure_rate=1.0,
        eval_top_p=1.0,
        eval_max_response_len=8,
        rollout_top_k=-1,
        rollout_stop=[],
    )
    loop = GenerationLoop(args, Hooks(flaky, one), reported.append)
    row: Any = SimpleNamespace(prompt="a", prompt_ids=[1], label=None, metadata={}, file="questions.jsonl", index=0)
    asyncio.run(loop.evaluate([row], 1.0, "evaluation of demo/greedy"))
    last = reported[-1]  # before or after the last trajectory
    assert (last.what, last.total, last.unit) == ("evaluation of demo/greedy", 3, "trajectories")
    assert last.done in (2, 3)
    assert re.fullmatch(rf"{3 - last.done} in flight, [1-9]\d* tokens/s, 1 failed", last.notes)


def test_a_wait_that_names_no_service_is_told_by_its_line(caplog: Any) -> None:
    async def slow(args: Any, sample: Sample, **_: Any) -> float:
        await ask_the_judge()
        return 1.0

    run(reward=slow)
    line = caplog.records[0].getMessage()
    assert re.search(
        r"step 3: no trajectory has finished.*; oldest: sample 0 .*reward hook.*test_watch.py:\d+ in ask_the_judge",
        line,
    )


def test_a_hook_that_blocks_the_event_loop_is_named_with_its_stack(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(watch, "BLOCKED_SECONDS", 0.1)

    def wait_for_the_judge() -> None:
        time.sleep(0.6)

    async def judge(args: Any, sample: Sample, **_: Any) -> float:
        wait_for_the_judge()
        return 1.0

    run(reward=judge, samples=1)
    line = caplog.records[0].getMessage()
    assert re.search(r"step 3: for 0 s all trajectories wait for test_watch.py:\d+ in wait_for_the_judge", line)
    assert "in judge\n    wait_for_the_judge()" in line
    assert "asyncio.to_thread" in line


def test_a_hook_that_spins_costs_its_own_sample_only() -> None:
    async def spin(args: Any, sample: Sample, **_: Any) -> float:
        while sample.index == 0:
            pass
        return 1.0

    spun, fine = run(reward=spin, hook_timeout=0.3)
    assert (spun.status, spun.stop_reason) == (SampleStatus.FAILED, StopReason.HOOK_TIMEOUT)
    assert re.search(r"spin: no result within --hook-timeout 0.3 s \(test_watch.py:\d+\)", spun.error or "")
    assert fine.status is SampleStatus.COMPLETED


def test_a_hook_that_blocks_in_a_call_is_ended_when_that_returns() -> None:
    async def sleep(args: Any, sample: Sample, **_: Any) -> float:
        time.sleep(0.6)
        return 1.0

    (slept,) = run(reward=sleep, samples=1, hook_timeout=0.2)
    assert slept.stop_reason is StopReason.HOOK_TIMEOUT
