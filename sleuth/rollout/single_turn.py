"""The generate hook where none is named: one generation, no environment."""

from __future__ import annotations

from typing import Any

from sleuth.rollout.context import rollout_context
from sleuth.sample import Sample, SampleStatus, StopReason


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the model continue the prompt once."""
    generation = await rollout_context().engine.generate(sample.trace.token_ids, sampling_params)
    if generation.finish_reason == "abort":
        return sample.finish(SampleStatus.ABORTED, StopReason.ENGINE_ABORT, "the engine aborted the request")
    sample.trace.append_model(generation.ids, generation.log_probs)
    sample.weight_version = generation.weight_version
    if generation.finish_reason == "length":
        return sample.finish(SampleStatus.TRUNCATED, StopReason.RESPONSE_LIMIT)
    return sample.finish(SampleStatus.COMPLETED, StopReason.ENDED)
