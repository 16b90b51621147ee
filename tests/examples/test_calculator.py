"""The example of the README runs: with a scripted engine, and with a real one."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sleuth.hooks import Generation, RolloutContext, load_hook, use_rollout_context
from sleuth.hooks.testing import ScriptedEngine, converse
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
ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_shows_the_code_as_it_is():
    shown = re.search(r"```python\n(class CalculatorSettings.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = (ROOT / "examples/calculator.py").read_text()
    assert shown is not None
    body = shown[1][shown[1].index("    conversation = ") :]
    assert body in code


def run(
    *turns: str | Generation, label: str = "84", context_limit: int | None = None, **settings: Any
) -> tuple[Sample, ScriptedEngine]:
    args = SimpleNamespace(rollout_max_context_len=context_limit, custom_config={"calculator": settings})
    return converse(
        generate,
        turns,
        tokenizer=TOKENIZER,
        prompt="12 * 7?",
        label=label,
        reward=reward_func,
        args=args,
        stop=["#"],
        max_new_tokens=100,
    )


def test_a_call_and_an_answer():
    sample, engine = run("Let me see: <calc>12 * 7</calc>", "It is 84.")
    assert (sample.status, sample.stop_reason, sample.reward) == (SampleStatus.COMPLETED, StopReason.ANSWERED, 1.0)
    assert [segment.source for segment in sample.trace.segments] == ["model", "observation", "model"]
    assert (sample.rollout_metrics["calls"], sample.rollout_metrics["turns"]) == (1.0, 2.0)
    assert sample.weight_version == "1"
    ids, params = engine.requests[1]
    assert TOKENIZER.decode(ids) == "12 * 7?Let me see: <calc>12 * 7</calc><result>84</result>"
    assert params["stop"] == ["#", "</calc>"]


@pytest.mark.parametrize(("call", "result"), [("2+3", "5"), (" 2 - 3 ", "-1"), ("-4*-5", "20")])
def test_operations(call, result):
    _, engine = run(f"<calc>{call}</calc>", "done")
    assert TOKENIZER.decode(engine.requests[1][0]).endswith(f"<result>{result}</result>")


def test_a_result_that_the_model_did_not_say_itself_earns_nothing():
    assert run("<calc>12 * 7</calc>", "So be it.")[0].reward == 0.0


@pytest.mark.parametrize(("settings", "calls"), [({}, 3), ({"max_calls": 1}, 1), ({"max_calls": 0}, 0)])
def test_calls_are_limited(settings, calls):
    sample, _ = run(*["<calc>1 + 1</calc>"] * 9, **settings)
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.TURN_LIMIT)
    assert len(sample.trace.segments) == 2 * calls + 1
    assert sample.rollout_metrics["calls"] == calls


def test_the_context_is_limited():
    sample, engine = run("<calc>1 + 1</calc>", context_limit=40)
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
    assert engine.requests[0][1]["max_new_tokens"] == 40 - len("12 * 7?")


@pytest.mark.parametrize(
    ("finish_reason", "status"), [("length", SampleStatus.TRUNCATED), ("abort", SampleStatus.ABORTED)]
)
def test_a_turn_that_did_not_end_by_itself(finish_reason, status):
    sample, _ = run(Generation(TOKENIZER.encode("Hello"), [-0.5] * 5, "Hello", finish_reason))
    assert (sample.status, len(sample.trace.response_ids)) == (status, 5)


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
