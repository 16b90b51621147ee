"""A generate hook that needs no engine, unless a test asks for one: its words depend on the question's row."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from sleuth.hooks import FailSample, Sample, SampleStatus, StopReason, rollout_context

calls: list[int] = []
trouble: dict[str, int] = {}
"""What happens at which call: `interrupt`, `engine` (which is asked), `search` (fails)."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    calls.append(sample.index)
    number = len(calls)
    if number == trouble.get("interrupt"):
        signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(0)  # where a real hook waits
    if number == trouble.get("engine"):
        await rollout_context().engine.generate(sample.trace.token_ids, {"max_new_tokens": 1})
    if number == trouble.get("search"):
        raise FailSample(StopReason.SEARCH_FAILED, "the backend is away")
    sample.trace.append_model([5, 6], [-0.1, -0.2])
    sample.report(searches=1, search_seconds=0.25)
    return sample.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)


async def reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    right = float((sample.row or 0) % 3 == 0)
    return {"reward": right, "exact_match": right, "valid_format": 1.0}
