"""Hooks written for slime: the example as it is, with scripted engines, and hooks that do it wrong."""

from __future__ import annotations

import asyncio
import logging
import sys
import types
from typing import Any

import pytest
from aiohttp import web

from sleuth.arguments import Args, parse_args
from sleuth.compat.slime.adapter import adapted, as_reward, matches
from sleuth.hooks import Generation, RolloutContext, load_hook, use_rollout_context
from sleuth.hooks.testing import ScriptedEngine
from sleuth.rollout.hook_runner import HookRunner, Hooks, load_hooks
from sleuth.rollout.loop import rollout_parameters
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace
from tests.scripted import make_plain_bpe_tokenizer, serving
from tests.test_generate_with_search_engine import CITIES

TOKENIZER = make_plain_bpe_tokenizer()
EXAMPLE = {
    "custom_generate_function_path": "examples.slime_search.generate",
    "custom_rm_path": "examples.slime_search.reward_func",
}


def run_args(*flags: str, **values: Any) -> Args:
    words = ["--hf-checkpoint", "x", "--prompt-data", "x.jsonl", "--colocate", "--custom-rm-path", "x.y", *flags]
    return parse_args(words).model_copy(update=values)


async def retriever(request: web.Request) -> web.Response:
    query = (await request.json())["queries"][0]
    found = [
        {"document": {"contents": f'"{country}"\n{city} is the capital.'}, "score": 1.0}
        for country, city in CITIES.items()
        if country in query
    ]
    return web.json_response({"result": [found]})


def new_sample(text: str = "capital of France?", label: Any = "Paris") -> Sample:
    return Sample(0, 0, text, TokenTrace(TOKENIZER.encode(text, add_special_tokens=False)), label=label)


def hold(engine: Any, sample: Sample, args: Args, hooks: Hooks | None = None) -> Sample:
    """One trajectory as a run would do it, with the retriever at the URL that the arguments name."""

    async def run() -> Sample:
        async with serving(retriever, "/retrieve") as url:
            settings = args.model_copy(update={"search_url": url})
            runner = HookRunner(settings, hooks or load_hooks(args))
            with use_rollout_context(RolloutContext(engine, TOKENIZER)):
                return await runner.run(sample, rollout_parameters(settings), evaluation=False)

    return asyncio.run(run())


SCRIPT = ["<think> I </think><search> France </search>", "<think> I </think><answer> Paris </answer>"]


def test_the_example_runs_as_it_is():
    engine = ScriptedEngine(TOKENIZER, SCRIPT)
    sample = hold(engine, new_sample(), run_args(**EXAMPLE))
    assert (sample.status, sample.stop_reason, sample.error) == (SampleStatus.COMPLETED, StopReason.ENDED, None)
    assert sample.reward == 1.0
    assert [segment.source for segment in sample.trace.segments] == ["model", "observation", "model"]
    assert "Paris is the capital." in TOKENIZER.decode(sample.trace.response_ids)
    assert sample.trace.token_ids[: len(engine.requests[1][0])] == engine.requests[1][0]
    assert sample.rollout_metrics == {"turns": 2, "drifted_tokens": 0}


def retokenized(text: str) -> Generation:
    """A turn whose tokens are letters, which the tokenizer would have joined."""
    ids = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in text]
    return Generation(ids, [-0.5] * len(ids), text, "stop", "7")


def test_ids_that_drifted_are_told_once_and_scored(caplog: pytest.LogCaptureFixture):
    args = run_args(**EXAMPLE, custom_config={"custom": {"return_logprob": False}})
    hooks = load_hooks(args)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine = ScriptedEngine(TOKENIZER, [retokenized("<search> France </search>"), SCRIPT[1]])
            sample = hold(engine, new_sample(), args, hooks)
            assert sample.error is None
    trace = sample.trace
    assert trace.response_ids[:1] != retokenized("<search>").ids[:2]
    assert sample.rollout_metrics["drifted_tokens"] > 0
    assert sample.weight_version == "1"
    assert all((value < 0) == bool(mask) for value, mask in zip(trace.log_probs, trace.loss_mask, strict=True))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("generate hook examples.slime_search.generate: ")
    assert f"of {sum(trace.loss_mask)} trained tokens are not those that the engine sampled" in warning


def test_text_that_encodes_to_the_same_ids_has_not_drifted(caplog: pytest.LogCaptureFixture):
    args = run_args(**EXAMPLE, custom_config={"custom": {"return_logprob": False}})
    with caplog.at_level(logging.WARNING):
        sample = hold(ScriptedEngine(TOKENIZER, [SCRIPT[1]]), new_sample(), args)
    assert (sample.rollout_metrics["drifted_tokens"], caplog.records) == (0, [])
    assert sample.trace.log_probs == [-0.01 * (i + 1) for i in range(len(sample.trace.response_ids))]


def test_a_full_context_ends_a_trajectory():
    tight = len(new_sample().trace.prompt_ids) + 30
    sample = hold(ScriptedEngine(TOKENIZER, SCRIPT), new_sample(), run_args(**EXAMPLE, rollout_max_context_len=tight))
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, None)
    assert len(sample.trace) <= tight


# --- Hooks of a few lines ---

HEAD = """
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def ask(args, sample, params):
    return await post(get_model_url(args, "actor"), {"text": sample.prompt, "sampling_params": params})

async def reward(args, sample, **kwargs):
    return {"score": 0.5, "acc": True, "pred": "Paris"}
"""


def hooks_of(body: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Hooks:
    (tmp_path / "for_slime.py").write_text(HEAD + body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "for_slime", raising=False)
    return Hooks(
        generate=adapted(load_hook("for_slime.generate", "generate"), "generate"),
        reward=adapted(load_hook("for_slime.reward", "reward"), "reward"),
    )


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return [sample, sample]", "expected one Sample, found list; one prompt makes one sample here"),
        ("sample.status = Sample.Status.FAILED\n    return sample", "the hook set Sample.Status.FAILED"),
        ("sample.tokens, sample.response_length = [1, 2], 2\n    return sample", "found 2 tokens, response_length 2"),
        (
            "sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3], 2, [1]\n    return sample",
            "response_length 2 and 1 in loss_mask",
        ),
        (
            "sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2, 3], 2, [-1.0]\n    return sample",
            "expected a log-probability for each of 2 response tokens, found 1",
        ),
        ("await post(get_model_url(args, 'x', '/flush_cache'), {})", "expected /generate at the engines' address"),
        ("await post(get_model_url(args, 'x'), {'text': ['a', 'b']})", "expected input_ids or one text in a request"),
        ("return args.no_such_thing", "no entry of the YAML section custom is named no_such_thing"),
        ("args.rm_type = 'math'\n    return await async_rm(args, sample)", "rm_type math: expected a reward hook"),
    ],
)
def test_what_a_hook_does_wrong_costs_its_sample(body: str, error: str, monkeypatch, tmp_path):
    hooks = hooks_of(f"async def generate(args, sample, params):\n    {body}\n", monkeypatch, tmp_path)
    sample = hold(ScriptedEngine(TOKENIZER, SCRIPT), new_sample(), run_args(), hooks)
    assert sample.status is SampleStatus.FAILED
    assert error in (sample.error or "")


def test_a_hook_may_append_turns_and_score_them_itself(monkeypatch, tmp_path):
    body = """
async def generate(args, sample, params, evaluation=False):
    sample.tokens = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    answer = await ask(args, sample, params)
    entries = answer["meta_info"]["output_token_logprobs"]
    ids, log_probs = [e[1] for e in entries], [e[0] for e in entries]
    sample.append_response_tokens(
        args, tokens=ids, log_probs=log_probs, trainable=True, meta_info=answer["meta_info"], text=answer["text"])
    sample.append_response_tokens(args, tokens=[5, 6], trainable=False, text="found")
    sample.reward = await async_rm(args, sample)
    return sample
"""
    hooks = hooks_of(body, monkeypatch, tmp_path)
    sample = hold(
        ScriptedEngine(TOKENIZER, ["Paris"]), new_sample(), run_args(custom_rm_path="for_slime.reward"), hooks
    )
    assert (sample.reward, sample.reward_components, sample.notes) == (0.5, {"acc": 1.0}, {"pred": "Paris"})
    assert sample.trace.loss_mask[-2:] == [0, 0]
    assert [segment.source for segment in sample.trace.segments] == ["model", "observation"]


def test_a_reward_for_slime_scores_samples_of_other_hooks(monkeypatch, tmp_path):
    body = """
async def generate(args, sample, params): ...
async def reward(args, sample, **kwargs):
    return float(sample.response == "Paris" and sample.status == Sample.Status.COMPLETED and sample.tokens[-1] == 9)
"""
    reward = hooks_of(body, monkeypatch, tmp_path).reward

    async def generate(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        sample.trace.append_model(TOKENIZER.encode("Paris", add_special_tokens=False), [-1.0] * len(PARIS))
        return sample.finish(SampleStatus.COMPLETED, StopReason.ENDED)

    PARIS = TOKENIZER.encode("Paris", add_special_tokens=False)
    sample = hold(ScriptedEngine(TOKENIZER, []), new_sample(), run_args(), Hooks(generate, reward))
    assert sample.reward == float(PARIS[-1] == 9)
    assert sample.error is None


def test_a_reward_without_a_total_is_refused():
    with pytest.raises(ValueError, match="expected reward or score among the parts of a reward, found acc"):
        as_reward({"acc": 1.0}, new_sample())
    assert as_reward({"acc": 1.0}, new_sample(), "acc") == {"reward": 1.0}


def test_modules_of_slime_that_have_no_stand_in_are_named(monkeypatch, tmp_path):
    (tmp_path / "other_slime.py").write_text(
        "from slime.utils.misc import load_function\nasync def generate(a, b, c): ..."
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"stands in for slime.utils.types, .* and knows no slime.utils.misc"):
        load_hook("other_slime.generate", "generate")


def test_hooks_that_import_no_slime_stay_as_they_are():
    own = load_hook("generate_with_search.generate", "generate")
    assert adapted(own, "generate") is own
    assert adapted(types.SimpleNamespace(), "generate")  # no module, no source


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3, 4], [1, 9, 4], 2),
        ([1, 5, 6, 7, 2], [1, 6, 8, 2], 3),
        ([], [1], 0),
        ([1], [], 0),
    ],
)
def test_common_stretches(left: list[int], right: list[int], expected: int):
    found = matches(left, right)
    assert sum(size for _, _, size in found) == expected
    for i, j, size in found:
        assert left[i : i + size] == right[j : j + size]
