"""The generate hook that runs if no flag names one: one generation, no environment."""

from __future__ import annotations

from typing import Any

from sleuth.hooks.conversation import Conversation
from sleuth.sample import Sample, SampleStatus, StopReason


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Have the model continue the prompt once, within the budgets."""
    conversation = Conversation(args, sample, sampling_params)
    if await conversation.turn():
        conversation.finish(SampleStatus.COMPLETED, StopReason.ENDED)
    return sample
