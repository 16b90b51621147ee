"""Hooks without an engine: the script speaks as an engine would."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from examples.calculator import generate, reward_func
from sleuth.hooks import Conversation, Generation, Sample, SampleStatus, StopReason
from sleuth.hooks.testing import ScriptedEngine, converse, no_reward
from tests.scripted import make_plain_bpe_tokenizer

TOKENIZER = make_plain_bpe_tokenizer()


def test_a_pair_of_hooks_is_run_on_a_script():
    sample, engine = converse(
        generate, ["<calc>12 * 7</calc>", "84"], tokenizer=TOKENIZER, prompt="12 * 7?", label="84", reward=reward_func
    )
    assert (sample.status, sample.stop_reason, sample.reward) == (SampleStatus.COMPLETED, StopReason.ANSWERED, 1.0)
    assert sample.reward_components == {"exact_match": 1.0}
    assert len(engine.requests) == 2
    ids, params = engine.requests[1]
    assert TOKENIZER.decode(ids) == "12 * 7?<calc>12 * 7</calc><result>84</result>"
    assert params == {"temperature": 1.0, "max_new_tokens": 512, "stop": ["</calc>"]}


def test_arguments_and_sampling_parameters_can_be_given():
    args: Any = SimpleNamespace(custom_config={"calculator": {"max_calls": 0}}, rollout_max_context_len=None)
    sample, engine = converse(generate, ["<calc>1 + 1</calc>"], tokenizer=TOKENIZER, args=args, temperature=0.5)
    assert sample.stop_reason is StopReason.TURN_LIMIT
    assert engine.requests[0][1]["temperature"] == 0.5


async def ask(engine: ScriptedEngine, **params: Any) -> Generation:
    return await engine.generate([1], {"max_new_tokens": 100, **params})


def run(turn: str | Generation, **params: Any) -> Generation:
    return asyncio.run(ask(ScriptedEngine(TOKENIZER, [turn]), **params))


@pytest.mark.parametrize("stop", ["</answer>", ["###", "</answer>"]])
def test_a_turn_ends_with_its_first_stop_string(stop: Any):
    generation = run("<answer> x </answer> and more", stop=stop)
    assert generation.text == "<answer> x </answer>"
    assert generation.finish_reason == "stop"
    assert len(generation.ids) == len(generation.log_probs)


def test_a_turn_is_cut_at_its_limit():
    generation = run("search " * 9, max_new_tokens=4)
    assert (len(generation.ids), generation.finish_reason) == (4, "length")


def test_a_generation_is_given_as_it_is():
    generation = Generation([3], [-1.0], "x", "abort", "9")
    assert run(generation) is generation


def test_a_hook_that_asks_for_more_than_the_script_has():
    async def greedy(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        conversation = Conversation(args, sample, sampling_params)
        while await conversation.turn():
            pass
        return sample

    with pytest.raises(IndexError, match="the script has 2 turns; the hook asked for one more"):
        converse(greedy, ["a", "b"], tokenizer=TOKENIZER)


def test_a_generate_hook_can_be_tried_without_a_reward():
    sample, _ = converse(generate, ["84"], tokenizer=TOKENIZER)
    assert sample.reward is None
    sample, _ = converse(generate, ["84"], tokenizer=TOKENIZER, reward=no_reward)
    assert sample.reward == 0.0
