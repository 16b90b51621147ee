"""A complete pair of hooks: the model may call a calculator, and is scored by its final number.

    python train.py ... \\
        --custom-generate-function-path examples.calculator.generate \\
        --custom-rm-path examples.calculator.reward_func

Copy it to write your own. The model writes `<calc>12 * 7</calc>`, reads `<result>84</result>`, and
goes on; a turn without a call ends the trajectory. The label of a row is the expected number.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from sleuth.rollout.context import rollout_context
from sleuth.sample import Sample, SampleStatus, StopReason

MAX_CALLS = 3
CALL = re.compile(r"<calc>\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*</calc>$")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Make one trajectory: turns of the model and results of the calculator, appended as token ids."""
    engine, tokenizer = rollout_context().engine, rollout_context().tokenizer
    calls = 0
    while True:
        room = (args.rollout_max_context_len or float("inf")) - len(sample.trace)
        if room < 1:
            return sample.finish(SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
        turn = await engine.generate(
            sample.trace.token_ids,
            sampling_params
            | {
                "stop": [*sampling_params["stop"], "</calc>"],
                "max_new_tokens": min(sampling_params["max_new_tokens"], room),
            },
        )
        if turn.finish_reason == "abort":
            return sample.finish(SampleStatus.ABORTED, StopReason.ENGINE_ABORT, "the engine aborted the request")
        sample.trace.append_model(turn.ids, turn.log_probs)  # loss mask 1
        sample.weight_version = turn.weight_version
        if turn.finish_reason == "length":
            return sample.finish(SampleStatus.TRUNCATED, StopReason.RESPONSE_LIMIT)

        call = CALL.search(turn.text)
        if call is None:
            sample.rollout_metrics["calls"] = float(calls)  # averaged as the metric rollout/calls
            return sample.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)
        if calls == MAX_CALLS:
            return sample.finish(SampleStatus.TRUNCATED, StopReason.TURN_LIMIT)
        calls += 1
        left, sign, right = call.groups()
        result = f"<result>{OPERATORS[sign](int(left), int(right))}</result>"
        sample.trace.append_observation(tokenizer.encode(result, add_special_tokens=False))  # loss mask 0


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """1 if the last number that the model itself wrote is the label; each entry is a metric `reward/<name>`."""
    said = [token for token, mask in zip(sample.trace.response_ids, sample.trace.loss_mask, strict=True) if mask]
    numbers = re.findall(r"-?\d+", str(rollout_context().tokenizer.decode(said)))
    correct = bool(numbers) and numbers[-1] == str(sample.label)
    return {"reward": float(correct), "exact_match": float(correct)}
