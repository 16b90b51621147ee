"""The generate hook where none is named: one generation, no environment."""

from __future__ import annotations

from typing import Any

from sleuth.hooks.conversation import Conversation
from sleuth.sample import Sample, SampleStatus, StopReason


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the model continue the prompt once, as far as the budgets reach."""
    conversation = Conversation(args, sample, sampling_params)
    if await conversation.turn():
        conversation.finish(SampleStatus.COMPLETED, StopReason.ENDED)
    return sample
