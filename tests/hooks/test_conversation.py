"""One trajectory between turns: budgets, stop strings, endings, and what a hook may not do."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.hooks import (
    Conversation,
    Generation,
    RolloutContext,
    Sample,
    SampleStatus,
    StopReason,
    TokenTrace,
    Turn,
    single_turn,
    use_rollout_context,
)
from sleuth.hooks.testing import ScriptedEngine, converse
from tests.scripted import make_plain_bpe_tokenizer
from tests.tiny_models import make_byte_bpe_tokenizer

TOKENIZER = make_plain_bpe_tokenizer()
PROMPT = TOKENIZER.encode("capital of France")
VOCABULARY = 1000
Hook = Callable[[Conversation], Coroutine[Any, Any, Any]]


def hold(
    hook: Hook,
    *turns: str | Generation,
    context: int | None = None,
    own_stop: tuple[str, ...] = (),
    **params: Any,
) -> tuple[Sample, Any, ScriptedEngine]:
    """What a hook leaves of a sample, what it returns, and the engine it spoke to."""
    engine = ScriptedEngine(TOKENIZER, turns)
    sample = Sample(7, 0, "capital of France", TokenTrace(list(PROMPT)))
    args = SimpleNamespace(rollout_max_context_len=context)
    with use_rollout_context(RolloutContext(engine, TOKENIZER, VOCABULARY)):
        conversation = Conversation(args, sample, {"max_new_tokens": 100, **params}, stop=own_stop)
        result = asyncio.run(hook(conversation))
    return sample, result, engine


async def one_turn(conversation: Conversation) -> Turn | None:
    return await conversation.turn()


async def cut_turn(conversation: Conversation) -> Turn | None:
    return await conversation.turn(keep_cut=True)


def length(text: str) -> int:
    return len(TOKENIZER.encode(text))


def test_a_turn_keeps_ids_masks_and_log_probs_in_step():
    sample, turn, _ = hold(one_turn, "search <answer> x", own_stop=("</answer>",))
    assert turn.text == "search <answer> x"
    assert turn.limit is None
    assert sample.trace.response_ids == turn.ids == TOKENIZER.encode("search <answer> x")
    assert sample.trace.loss_mask == [1] * len(turn.ids)
    assert all(value < 0 for value in sample.trace.log_probs)
    assert sample.weight_version == "1"
    assert sample.status is SampleStatus.PENDING  # the hook decides what comes next


def test_stop_strings_of_hook_and_caller_are_joined_each_once():
    _, turn, engine = hold(one_turn, "a </search> b", own_stop=("</search>", "###"), stop="###")
    assert turn.text == "a </search>"
    assert engine.requests[0][1]["stop"] == ["###", "</search>"]
    _, _, engine = hold(one_turn, "a")
    assert engine.requests[0][1]["stop"] == []


def test_the_response_limit_cuts_a_turn():
    sample, turn, engine = hold(one_turn, "search " * 50, max_new_tokens=5)
    assert turn is None
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.RESPONSE_LIMIT)
    assert len(sample.trace.response_ids) == 5
    assert engine.requests[0][1]["max_new_tokens"] == 5


def test_the_context_limit_cuts_a_turn_and_is_named_as_such():
    sample, turn, engine = hold(one_turn, "search " * 50, context=len(PROMPT) + 5)
    assert turn is None
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
    assert engine.requests[0][1]["max_new_tokens"] == 5


def test_where_both_limits_are_equal_the_response_limit_is_named():
    sample, _, _ = hold(one_turn, "search " * 50, max_new_tokens=5, context=len(PROMPT) + 5)
    assert sample.stop_reason is StopReason.RESPONSE_LIMIT


@pytest.mark.parametrize(
    ("budget", "limit"),
    [({"max_new_tokens": 5}, StopReason.RESPONSE_LIMIT), ({"context": len(PROMPT) + 5}, StopReason.CONTEXT_LIMIT)],
)
def test_a_hook_may_keep_a_cut_turn_and_decide_itself(budget: dict[str, int], limit: StopReason):
    sample, turn, _ = hold(cut_turn, "search " * 50, **budget)
    assert turn.limit is limit
    assert len(turn.ids) == 5
    assert sample.status is SampleStatus.PENDING


@pytest.mark.parametrize("over", [0, 3])
def test_no_request_is_sent_where_the_context_is_full(over: int):
    sample, turn, engine = hold(cut_turn, "never said", context=len(PROMPT) - over)
    assert turn is None
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
    assert engine.requests == []


@pytest.mark.parametrize("hook", [one_turn, cut_turn])
def test_an_abort_ends_the_sample_with_what_was_said(hook: Hook):
    sample, turn, _ = hold(hook, Generation([5, 6], [-0.5, -0.5], "x", "abort", "4"))
    assert turn is None
    assert (sample.status, sample.stop_reason) == (SampleStatus.ABORTED, StopReason.ENGINE_ABORT)
    assert sample.error == "the engine aborted a request"
    assert sample.trace.response_ids == [5, 6]


def test_an_observation_is_read_and_never_trained_on():
    async def hook(conversation: Conversation) -> None:
        await conversation.turn()
        assert conversation.observe("Paris")
        assert conversation.observe([5, 6], "correction")
        assert conversation.observe("")
        await conversation.turn()

    sample, _, engine = hold(hook, "search", "answer")
    assert [segment.source for segment in sample.trace.segments] == ["model", "observation", "correction", "model"]
    said, read = length("search"), length("Paris") + 2
    assert sample.trace.loss_mask == [1] * said + [0] * read + [1] * length("answer")
    assert sample.trace.log_probs[said : said + read] == [0.0] * read
    assert engine.requests[1][0] == sample.trace.token_ids[: len(PROMPT) + said + read]


@pytest.mark.parametrize(("free", "fits"), [(0, False), (1, True)])
def test_an_observation_must_leave_a_token_to_generate(free: int, fits: bool):
    async def hook(conversation: Conversation) -> bool:
        await conversation.turn()
        return conversation.observe([5, 6, 7])

    sample, observed, _ = hold(hook, "search", context=len(PROMPT) + length("search") + 3 + free)
    assert observed is fits
    assert len(sample.trace.response_ids) == length("search") + (3 if fits else 0)
    assert sample.stop_reason is (None if fits else StopReason.CONTEXT_LIMIT)


def test_an_observation_of_megabytes_ends_the_sample_without_being_encoded(monkeypatch: pytest.MonkeyPatch):
    tokenizer = make_byte_bpe_tokenizer()
    monkeypatch.setattr("sleuth.hooks.conversation.encode", None)
    engine = ScriptedEngine(tokenizer, [])
    sample = Sample(7, 0, "", TokenTrace([1, 2]))
    with use_rollout_context(RolloutContext(engine, tokenizer, VOCABULARY)):
        conversation = Conversation(SimpleNamespace(rollout_max_context_len=512), sample, {"max_new_tokens": 8})
        assert conversation.observe("a page " * 7_000_000) is False
    assert sample.stop_reason is StopReason.CONTEXT_LIMIT
    assert sample.trace.response_ids == []


def test_turns_and_seconds_are_reported():
    async def hook(conversation: Conversation) -> None:
        await conversation.turn()
        await conversation.turn()
        conversation.finish(SampleStatus.COMPLETED, "had_enough")

    sample, _, _ = hold(hook, "one", "two")
    assert (sample.status, sample.stop_reason) == (SampleStatus.COMPLETED, "had_enough")
    assert sample.rollout_metrics["turns"] == 2.0
    assert 0 < sample.rollout_metrics["generation_seconds"] < 10


def test_ids_beyond_the_vocabulary_are_refused_where_they_are_appended():
    async def hook(conversation: Conversation) -> None:
        conversation.observe([VOCABULARY])

    with pytest.raises(ValueError, match=r"expected ids in \[0, 1000\).* found 1000 in the response"):
        hold(hook)


@pytest.mark.parametrize(
    ("ids", "log_probs", "message"),
    [
        ([1, 2], [-0.5], "expected one log-probability a token, found 1 for 2 tokens"),
        ([1], [math.nan], "expected log-probabilities <= 0, found nan at token 0"),
        ([1, 2], [-0.5, 0.5], "found 0.5 at token 1"),
        ([1], [-math.inf], "found -inf"),
    ],
)
def test_an_engine_that_answers_nonsense_is_told(ids: list[int], log_probs: list[float], message: str):
    with pytest.raises(ValueError, match=message):
        hold(one_turn, Generation(ids, log_probs, "x", "stop"))


async def finish_twice(conversation: Conversation) -> None:
    conversation.finish(SampleStatus.COMPLETED, StopReason.ENDED)
    conversation.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)


async def speak_after_the_end(conversation: Conversation) -> None:
    conversation.finish(SampleStatus.COMPLETED, StopReason.ENDED)
    await conversation.turn()


async def observe_after_the_end(conversation: Conversation) -> None:
    conversation.finish(SampleStatus.COMPLETED, StopReason.ENDED)
    conversation.observe("more")


async def speak_after_a_cut(conversation: Conversation) -> None:
    assert await conversation.turn() is None
    await conversation.turn()


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (finish_twice, r"sample 7 is finished already \(completed, ended\).*finish a sample once"),
        (speak_after_the_end, r"sample 7 is finished \(completed, ended\), so it can generate no more"),
        (observe_after_the_end, "so it can observe no more: return it once turn.. gave None or observe.. gave False"),
        (speak_after_a_cut, r"sample 7 is finished \(truncated, response_limit\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_finished_sample_stays_as_it_is(hook: Hook, message: str):
    with pytest.raises(ValueError, match=message):
        hold(hook, "search " * 50, max_new_tokens=5)


@pytest.mark.parametrize("reason", ["Had enough", "", "7up", "x" * 41, None])
def test_a_reason_of_ones_own_is_a_word(reason: Any):
    async def hook(conversation: Conversation) -> None:
        conversation.finish(SampleStatus.COMPLETED, reason)

    with pytest.raises(ValueError, match="expected a StopReason, or a word"):
        hold(hook)


def test_a_sample_that_was_begun_is_refused():
    sample = Sample(0, 0, "p", TokenTrace([1], [2], [1], [-0.5]))
    engine = ScriptedEngine(TOKENIZER, [])
    with (
        use_rollout_context(RolloutContext(engine, TOKENIZER)),
        pytest.raises(ValueError, match="has 1 response tokens already: partial rollouts"),
    ):
        Conversation(SimpleNamespace(), sample, {})


def test_it_needs_a_rollout():
    with pytest.raises(LookupError, match="no rollout is under way"):
        Conversation(SimpleNamespace(), Sample(0, 0, "p", TokenTrace([1])), {})


def test_a_single_turn_ends_by_itself_or_by_a_budget():
    sample, _ = converse(single_turn.generate, ["answer"], tokenizer=TOKENIZER)
    assert (sample.status, sample.stop_reason) == (SampleStatus.COMPLETED, StopReason.ENDED)
    sample, _ = converse(single_turn.generate, ["answer " * 9], tokenizer=TOKENIZER, max_new_tokens=3)
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.RESPONSE_LIMIT)
