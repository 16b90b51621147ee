"""The example of the README runs: with a scripted engine, and with a real one."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sleuth.hooks import Generation, RolloutContext, load_hook, use_rollout_context
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace

generate = load_hook("examples.calculator.generate", "generate")
reward_func = load_hook("examples.calculator.reward_func", "reward")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = byte_tokenizer()


class ScriptedEngine:
    """Says the given turns; remembers what it was sent."""

    def __init__(self, *turns: str, finish_reason: str = "stop") -> None:
        self.turns, self.finish_reason = list(turns), finish_reason
        self.requests: list[tuple[str, dict[str, Any]]] = []

    async def generate(self, input_ids: Sequence[int], sampling_params: dict[str, Any]) -> Generation:
        self.requests.append((TOKENIZER.decode(list(input_ids)), sampling_params))
        ids = TOKENIZER.encode(self.turns.pop(0))
        text = TOKENIZER.decode(ids)
        return Generation(ids, [-0.5] * len(ids), text, self.finish_reason, "3")  # type: ignore[arg-type]


def run(engine: ScriptedEngine, label: str = "84", context_limit: int | None = None) -> Sample:
    args = SimpleNamespace(rollout_max_context_len=context_limit)
    sample = Sample(0, 0, "12 * 7?", TokenTrace(TOKENIZER.encode("12 * 7?")), label=label)

    async def trajectory() -> Sample:
        done = await generate(args, sample, {"stop": ["#"], "max_new_tokens": 100})
        scores = await reward_func(args, done)
        done.reward, done.reward_components = scores["reward"], scores
        return done

    with use_rollout_context(RolloutContext(engine, TOKENIZER)):
        return asyncio.run(trajectory())


def test_a_call_and_an_answer():
    engine = ScriptedEngine("Let me see: <calc>12 * 7</calc>", "It is 84.")
    sample = run(engine)
    assert (sample.status, sample.stop_reason, sample.reward) == (SampleStatus.COMPLETED, StopReason.ANSWERED, 1.0)
    assert [segment.source for segment in sample.trace.segments] == ["model", "observation", "model"]
    assert (sample.rollout_metrics["calls"], sample.rollout_metrics["turns"]) == (1.0, 2.0)
    assert sample.weight_version == "3"
    prompt, params = engine.requests[1]
    assert prompt == "12 * 7?Let me see: <calc>12 * 7</calc><result>84</result>"
    assert params["stop"] == ["#", "</calc>"]


@pytest.mark.parametrize(("call", "result"), [("2+3", "5"), (" 2 - 3 ", "-1"), ("-4*-5", "20")])
def test_operations(call, result):
    engine = ScriptedEngine(f"<calc>{call}</calc>", "done")
    run(engine)
    assert engine.requests[1][0].endswith(f"<result>{result}</result>")


def test_a_result_that_the_model_did_not_say_itself_earns_nothing():
    assert run(ScriptedEngine("<calc>12 * 7</calc>", "So be it.")).reward == 0.0


def test_calls_are_limited():
    sample = run(ScriptedEngine(*["<calc>1 + 1</calc>"] * 9))
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.TURN_LIMIT)
    assert len(sample.trace.segments) == 7


def test_the_context_is_limited():
    engine = ScriptedEngine("<calc>1 + 1</calc>")
    sample = run(engine, context_limit=40)
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
    assert engine.requests[0][1]["max_new_tokens"] == 40 - len("12 * 7?")


@pytest.mark.parametrize(
    ("finish_reason", "status", "tokens"), [("length", SampleStatus.TRUNCATED, 5), ("abort", SampleStatus.ABORTED, 5)]
)
def test_a_turn_that_did_not_end_by_itself(finish_reason, status, tokens):
    sample = run(ScriptedEngine("Hello", finish_reason=finish_reason))
    assert (sample.status, len(sample.trace.response_ids)) == (status, tokens)


@pytest.mark.engine
def test_with_a_real_engine(engine):
    from transformers import AutoConfig

    from sleuth.rollout.engine_client import EngineClient

    async def trajectory() -> Sample:
        vocab_size = AutoConfig.from_pretrained(engine.model_path).vocab_size
        client = EngineClient([engine.url], max_concurrency=4, vocab_size=vocab_size)
        ids = engine.tokenizer.encode("12 * 7?")
        sample = Sample(0, 0, "12 * 7?", TokenTrace(ids), label="84")
        params = {"temperature": 1.0, "stop": [], "max_new_tokens": 8}
        try:
            with use_rollout_context(RolloutContext(client, engine.tokenizer)):
                done = await generate(SimpleNamespace(rollout_max_context_len=64), sample, params)
                done.reward_components = await reward_func(None, done)
        finally:
            await client.close()
        return done

    sample = asyncio.run(trajectory())
    trace = sample.trace
    assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
    assert len(trace.response_ids) == len(trace.loss_mask) == len(trace.log_probs) > 0
    assert sample.reward_components["reward"] in (0.0, 1.0)
