"""A complete pair of hooks: the model may call a calculator, and is scored by its final number.

    python train.py ... \\
        --custom-generate-function-path examples.calculator.generate \\
        --custom-rm-path examples.calculator.reward_func

`python tools/try_hook.py` with the same flags tries it in seconds. Copy it to write your own; docs/hooks.md says what a
hook may do. The model writes `<calc>12 * 7</calc>`, reads `<result>84</result>`, and
goes on; a turn without a call ends the trajectory. The label of a row is the expected number.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from sleuth.hooks import Conversation, Sample, SampleStatus, Settings, StopReason, decode, rollout_context

CALL = re.compile(r"<calc>\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*</calc>$")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class CalculatorSettings(Settings, section="calculator"):
    """The section `calculator:` of a --custom-config-path file."""

    max_calls: int = 3


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Make one trajectory: turns of the model with results of the calculator in between."""
    conversation = Conversation(args, sample, sampling_params, stop=["</calc>"])
    max_calls = CalculatorSettings.of(args).max_calls
    sample.report(calls=0)  # averaged as the metric rollout/calls
    while turn := await conversation.turn():  # trained on; None once a budget has finished the sample
        call = CALL.search(turn.text)
        if call is None:
            return conversation.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)
        if conversation.turns > max_calls:
            return conversation.finish(SampleStatus.TRUNCATED, StopReason.TURN_LIMIT)
        left, sign, right = call.groups()
        if not conversation.observe(f"<result>{OPERATORS[sign](int(left), int(right))}</result>"):  # never trained on
            break
        sample.report(calls=conversation.turns)
    return sample


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """1 if the last number that the model itself wrote is the label; each entry is a metric `reward/<name>`."""
    said = [token for token, mask in zip(sample.trace.response_ids, sample.trace.loss_mask, strict=True) if mask]
    numbers = re.findall(r"-?\d+", decode(said, rollout_context().tokenizer))
    correct = bool(numbers) and numbers[-1] == str(sample.label)
    return {"reward": float(correct), "exact_match": float(correct)}
