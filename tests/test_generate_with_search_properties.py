"""Properties of every conversation: random turns, random passages, random budgets, two tokenizers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from generate_with_search import generate, reward_func, text_segments
from sleuth.hooks import RolloutContext, use_rollout_context
from sleuth.hooks.testing import ScriptedEngine
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace
from sleuth.search import format_observation
from sleuth.tokens import decode
from tests.scripted import check_trace, make_plain_bpe_tokenizer
from tests.tiny_models import make_byte_bpe_tokenizer

TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]
SPECIAL = ["<|im_end|>", "<|im_start|>", "<eos>", "<bos>", "<|endoftext|>"]
PIECES = [*TAGS, *TAGS, "Paris", " the ", "\n\n", ".", "?", ">", "<", "</", " ", "北京", "é", "😀", "Doc 2(Title: x) "]
GOOD_TURNS = ["<think>a</think><search>q</search>", "<think>a</think><answer>Paris</answer>"]
turn = st.one_of(
    st.sampled_from(GOOD_TURNS), st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.text(max_size=8)
)
passage_text = st.lists(st.sampled_from([*PIECES, *SPECIAL, "\n", "word " * 40, "\ud800"]), max_size=8).map("".join)
passages = st.lists(st.fixed_dictionaries({"title": passage_text, "text": passage_text}), max_size=5)
TOKENIZERS = {"merges": make_byte_bpe_tokenizer(), "plain": make_plain_bpe_tokenizer()}

found: list[dict[str, str]] = []


async def find(query: str, topk: int) -> list[dict[str, str]]:
    assert query.strip() == query != ""
    return found


def make_args(context: int, observation: int) -> Any:
    search_r1 = {"search_backend": f"{__name__}.find", "max_observation_tokens": observation}
    return SimpleNamespace(custom_config={"search_r1": search_r1}, rollout_max_context_len=context)


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    turns=st.lists(turn, min_size=6, max_size=6),
    results=passages,
    context=st.integers(5, 900),
    new_tokens=st.integers(1, 120),
    observation=st.integers(16, 300),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_conversation(
    name: str, turns: list[str], results: list[dict[str, str]], context: int, new_tokens: int, observation: int
) -> None:
    tokenizer = TOKENIZERS[name]
    found[:] = results
    engine = ScriptedEngine(tokenizer, turns)
    sample = Sample(0, 0, "", TokenTrace(encode("Where is it?", tokenizer)), label=["Paris"])
    args = make_args(context, observation)
    with use_rollout_context(RolloutContext(engine, tokenizer)):
        asyncio.run(generate(args, sample, {"max_new_tokens": new_tokens}))
        reward = asyncio.run(reward_func(args, sample))

    check_trace(sample, engine)
    assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
    assert len(sample.trace) <= max(context, len(sample.trace.prompt_ids))
    assert all(1 <= params["max_new_tokens"] <= new_tokens for _, params in engine.requests)
    segments = text_segments(sample, tokenizer)
    assert "".join(text for _, text in segments) == decode(sample.trace.response_ids, tokenizer)
    assert sample.rollout_metrics["searches"] <= 2
    assert (reward["answered"] == 1.0) >= (sample.stop_reason == StopReason.ANSWERED)
    if reward["valid_format"]:
        assert [source for source, _ in segments] == ["model", "observation"] * (len(segments) // 2) + ["model"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(results=passages, limit=st.integers(1, 400))
@settings(max_examples=200, deadline=None)
def test_every_observation(name: str, results: list[dict[str, str]], limit: int) -> None:
    tokenizer = TOKENIZERS[name]
    ids = format_observation(results, tokenizer, limit)
    frame = format_observation([], tokenizer, limit)
    assert len(ids) <= max(limit, len(frame))
    text = decode(ids, tokenizer)
    assert text.startswith("\n\n<information>")
    assert text.endswith("</information>\n\n")
    inside = text.removeprefix("\n\n<information>").removesuffix("</information>\n\n")
    assert not any(tag in inside for tag in TAGS)
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert len(encode(text, tokenizer)) == len(ids)
