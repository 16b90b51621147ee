"""The generate hook where none is named: one generation, no environment."""

from __future__ import annotations

import math
from typing import Any

from sleuth.rollout.context import rollout_context
from sleuth.sample import Sample, SampleStatus, StopReason


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the model continue the prompt once, as far as the context reaches."""
    wanted, room = sampling_params["max_new_tokens"], (args.rollout_max_context_len or math.inf) - len(sample.trace)
    if room < 1:
        return sample.finish(SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
    params = {**sampling_params, "max_new_tokens": min(wanted, room)}  # the engine refuses more than its context
    generation = await rollout_context().engine.generate(sample.trace.token_ids, params)
    if generation.finish_reason == "abort":
        return sample.finish(SampleStatus.ABORTED, StopReason.ENGINE_ABORT, "the engine aborted the request")
    sample.trace.append_model(generation.ids, generation.log_probs)
    sample.weight_version = generation.weight_version
    if generation.finish_reason == "length":
        reason = StopReason.RESPONSE_LIMIT if wanted <= room else StopReason.CONTEXT_LIMIT
        return sample.finish(SampleStatus.TRUNCATED, reason)
    return sample.finish(SampleStatus.COMPLETED, StopReason.ENDED)
