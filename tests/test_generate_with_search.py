"""The search conversation with a scripted engine, real tokenizers and the user's own backend."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import generate_with_search
from generate_with_search import CORRECTION, SearchSettings, check_args, generate, postprocess_predictions, reward_func
from sleuth.hooks import Generation, RolloutContext, use_rollout_context
from sleuth.hooks.testing import ScriptedEngine
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace
from sleuth.search import SearchError, SearchUnavailableError
from tests.scripted import check_trace, make_plain_bpe_tokenizer
from tests.tiny_models import make_byte_bpe_tokenizer

ACTIONS = [json.loads(line) for line in (Path(__file__).parent / "cases/actions.jsonl").open()]
PROMPT = "What is the capital of France? For example <answer> Beijing </answer>.\n"
SEARCH = "<think>a</think><search>capital of France</search>"
ANSWER = "<think>b</think><answer>Paris</answer>"
OBSERVATION = "\n\n<information>Doc 1(Title: France) Its capital is Paris.</information>\n\n"


@pytest.fixture(scope="module", params=["merges", "plain"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return make_byte_bpe_tokenizer() if request.param == "merges" else make_plain_bpe_tokenizer()


async def find_france(query: str, topk: int) -> list[dict[str, Any]]:
    return [{"document": {"contents": '"France"\nIts capital is Paris.'}}][:topk]


async def find_nothing(query: str, topk: int) -> list[dict[str, Any]]:
    return []


async def break_down(query: str, topk: int) -> list[dict[str, Any]]:
    raise SearchError("the index is gone", "backend")


async def refuse(query: str, topk: int) -> list[dict[str, Any]]:
    raise ValueError("at most 10 characters")


async def return_nonsense(query: str, topk: int) -> Any:
    return 7


def make_args(backend: str = "find_france", context: int | None = 4000, **search_r1: Any) -> Any:
    search_r1 = {"search_backend": f"{__name__}.{backend}", **search_r1}
    return SimpleNamespace(custom_config={"search_r1": search_r1}, rollout_max_context_len=context)


def converse(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[str | Generation], args: Any = None, **params: Any
) -> tuple[Sample, ScriptedEngine]:
    engine = ScriptedEngine(tokenizer, turns)
    sample = Sample(0, 0, PROMPT, TokenTrace(tokenizer.encode(PROMPT)), label={"ground_truth": {"target": ["Paris"]}})
    params = {"max_new_tokens": 200, "temperature": 1.0, **params}
    with use_rollout_context(RolloutContext(engine, tokenizer)):
        sample = asyncio.run(generate(args or make_args(), sample, params))
    check_trace(sample, engine)
    return sample, engine


def texts(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    return generate_with_search.text_segments(sample, tokenizer)


def reward(sample: Sample, tokenizer: PreTrainedTokenizerBase, args: Any = None) -> dict[str, float]:
    with use_rollout_context(RolloutContext(ScriptedEngine(tokenizer, []), tokenizer)):
        return asyncio.run(reward_func(args or make_args(), sample))


# --- Actions ---


@pytest.mark.parametrize("case", ACTIONS, ids=lambda case: case["id"])
def test_actions(case: dict[str, Any]) -> None:
    action, content = postprocess_predictions(case["text"])
    assert {"action": action, "content": content} == case["expect"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<search>open <answer>x</answer>", ("answer", "x")),  # the search never closed
        ("<search>a <answer>x</answer></search>", (None, "")),
        ("<search> </search><answer>x</answer>", (None, "")),
        ("</think><answer>x</answer>", ("answer", "x")),
        ("<think>a<answer>b</answer></think><think><search>c</search>", (None, "")),
        ("<think>a</think><think>b</think><search>c</search>", ("search", "c")),
        ("", (None, "")),
    ],
)
def test_more_actions(text: str, expected: tuple[str | None, str]) -> None:
    assert postprocess_predictions(text) == expected


@pytest.mark.parametrize(
    "part", ["<search>", "<think>", "</search>", "<think></think><search>", "<search><answer>", "<search>a</answer>"]
)
@pytest.mark.timeout(60)
def test_actions_in_linear_time(part: str) -> None:
    postprocess_predictions(part * 80_000)  # takes under a second; in quadratic time it would be an hour


# --- Conversations ---


def test_search_then_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    sample, engine = converse(tokenizer, [SEARCH, ANSWER])
    assert (sample.status, sample.stop_reason) == (SampleStatus.COMPLETED, StopReason.ANSWERED)
    assert texts(sample, tokenizer) == [("model", SEARCH), ("observation", OBSERVATION), ("model", ANSWER)]
    assert len(engine.requests) == 2
    metrics = sample.rollout_metrics
    assert (metrics["turns"], metrics["searches"], metrics["invalid_actions"]) == (2, 1, 0)
    assert metrics["observation_length"] == len(tokenizer.encode(OBSERVATION))
    assert sample.weight_version == "1"
    assert reward(sample, tokenizer) == {
        "reward": 1.0,
        "exact_match": 1.0,
        "f1": 1.0,
        "valid_format": 1.0,
        "retrieval_hit": 1.0,
        "answered": 1.0,
    }


def test_a_stop_string_inside_a_token_keeps_the_whole_token() -> None:
    tokenizer = make_byte_bpe_tokenizer()
    sample, _ = converse(tokenizer, [SEARCH + "\n\n<information>mine", ANSWER])
    first = sample.trace.segments[0]
    assert tokenizer.decode(sample.trace.response_ids[: first.end]) == SEARCH + "\n\n"
    assert sample.trace.loss_mask[first.end - 1] == 1
    assert reward(sample, tokenizer)["valid_format"] == 1.0


def test_end_of_turn_after_the_closing_tag(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [*tokenizer.encode(ANSWER), tokenizer.eos_token_id]
    turn = Generation(ids, [-0.5] * len(ids), ANSWER, "stop")
    sample, _ = converse(tokenizer, [SEARCH, turn])
    assert sample.trace.response_ids[-1] == tokenizer.eos_token_id
    assert reward(sample, tokenizer)["reward"] == 1.0


def test_the_turn_limit_leaves_one_generation_for_the_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    sample, engine = converse(tokenizer, [SEARCH] * 5)
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.TURN_LIMIT)
    assert len(engine.requests) == 3
    assert sample.rollout_metrics["searches"] == 2
    sample, _ = converse(tokenizer, [SEARCH, SEARCH, ANSWER])
    assert sample.stop_reason == StopReason.ANSWERED


def test_no_search_rounds_at_all(tokenizer: PreTrainedTokenizerBase) -> None:
    sample, _ = converse(tokenizer, [SEARCH], make_args(max_turns=0))
    assert sample.stop_reason == StopReason.TURN_LIMIT


def test_an_invalid_action_is_corrected(tokenizer: PreTrainedTokenizerBase) -> None:
    sample, _ = converse(tokenizer, ["hm", "<think><answer>x</answer>", ANSWER])
    assert [source for source, _ in texts(sample, tokenizer)] == ["model", "correction"] * 2 + ["model"]
    assert texts(sample, tokenizer)[1][1] == CORRECTION
    result = reward(sample, tokenizer)
    assert sample.notes["answer"] == "Paris"
    assert "corrected" in sample.notes["invalid_reason"]
    assert (result["exact_match"], result["valid_format"]) == (1.0, 0.0)
    assert result["reward"] == pytest.approx(0.8)


def test_too_many_invalid_actions(tokenizer: PreTrainedTokenizerBase) -> None:
    sample, engine = converse(tokenizer, ["hm"] * 9, make_args(max_invalid_actions=1))
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.INVALID_ACTION_LIMIT)
    assert len(engine.requests) == 2
    assert sample.rollout_metrics["invalid_actions"] == 2


def test_response_limit(tokenizer: PreTrainedTokenizerBase) -> None:
    sample, _ = converse(tokenizer, ["<think>" + "a b c " * 50], max_new_tokens=20)
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.RESPONSE_LIMIT)
    assert len(sample.trace.response_ids) == 20


def test_an_action_that_closes_on_the_last_token_acts(tokenizer: PreTrainedTokenizerBase) -> None:
    sample, _ = converse(tokenizer, [ANSWER], max_new_tokens=len(tokenizer.encode(ANSWER)))
    assert sample.stop_reason == StopReason.ANSWERED


def test_context_limit_bounds_a_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    context = len(tokenizer.encode(PROMPT)) + 10
    sample, engine = converse(tokenizer, ["a b c " * 50], make_args(context=context))
    assert (sample.status, sample.stop_reason) == (SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
    assert engine.requests[0][1]["max_new_tokens"] == 10


@pytest.mark.parametrize("over", [0, 3])
def test_no_request_where_the_context_is_full(tokenizer: PreTrainedTokenizerBase, over: int) -> None:
    sample, engine = converse(tokenizer, [], make_args(context=len(tokenizer.encode(PROMPT)) - over))
    assert sample.stop_reason == StopReason.CONTEXT_LIMIT
    assert not engine.requests


def test_an_observation_never_overflows_the_context(tokenizer: PreTrainedTokenizerBase) -> None:
    full = len(tokenizer.encode(PROMPT)) + len(tokenizer.encode(SEARCH)) + len(tokenizer.encode(OBSERVATION))
    sample, _ = converse(tokenizer, [SEARCH, ANSWER], make_args(context=full))
    assert sample.stop_reason == StopReason.CONTEXT_LIMIT
    assert len(sample.trace) < full
    sample, engine = converse(tokenizer, [SEARCH, "ab"], make_args(context=full + 1))
    assert engine.requests[1][1]["max_new_tokens"] == 1


def test_abort(tokenizer: PreTrainedTokenizerBase) -> None:
    sample, _ = converse(tokenizer, [Generation([], [], "", "abort")])
    assert (sample.status, sample.stop_reason) == (SampleStatus.ABORTED, StopReason.ENGINE_ABORT)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
def test_a_wrong_log_prob_is_an_error(tokenizer: PreTrainedTokenizerBase, value: float) -> None:
    with pytest.raises(ValueError, match="log-probabilit"):
        converse(tokenizer, [Generation([5, 6], [-0.1, value], "ab", "stop")])


def test_stop_strings_are_merged(tokenizer: PreTrainedTokenizerBase) -> None:
    _, engine = converse(tokenizer, [ANSWER], stop=["###", "</search>"])
    assert engine.requests[0][1]["stop"] == ["###", "</search>", "</answer>"]
    _, engine = converse(tokenizer, [ANSWER], stop="###")
    assert engine.requests[0][1]["stop"] == ["###", "</search>", "</answer>"]


def test_nothing_found_is_no_failure(tokenizer: PreTrainedTokenizerBase) -> None:
    sample, _ = converse(tokenizer, [SEARCH, ANSWER], make_args("find_nothing"))
    assert texts(sample, tokenizer)[1][1] == "\n\n<information></information>\n\n"
    assert sample.status == SampleStatus.COMPLETED


@pytest.mark.parametrize(("backend", "error"), [("break_down", "index is gone"), ("return_nonsense", "not a list")])
def test_a_failed_search_fails_the_sample(tokenizer: PreTrainedTokenizerBase, backend: str, error: str) -> None:
    sample, _ = converse(tokenizer, [SEARCH], make_args(backend, search_retries=0))
    assert (sample.status, sample.stop_reason) == (SampleStatus.FAILED, StopReason.SEARCH_FAILED)
    assert error in str(sample.error)


def test_a_backend_that_is_down_stops_the_rollout() -> None:
    tokenizer = make_byte_bpe_tokenizer()
    samples = [Sample(i, 0, PROMPT, TokenTrace(tokenizer.encode(PROMPT))) for i in range(40)]
    engine = ScriptedEngine(tokenizer, [f"<search>{i}</search>" for i in range(40)])

    async def run() -> None:
        args, params = make_args("break_down"), {"max_new_tokens": 50}
        await asyncio.gather(*(generate(args, sample, params) for sample in samples))

    with (
        use_rollout_context(RolloutContext(engine, tokenizer)),
        pytest.raises(SearchUnavailableError, match=r"20 of the last 20 searches failed.*index is gone"),
    ):
        asyncio.run(run())


def test_a_think_that_the_prompt_opened() -> None:
    tokenizer = make_byte_bpe_tokenizer()
    engine = ScriptedEngine(tokenizer, ["a <answer>no</answer>", ANSWER])
    sample = Sample(0, 0, "", TokenTrace(tokenizer.encode("Assistant: <think>\n")), label="Paris")
    with use_rollout_context(RolloutContext(engine, tokenizer)):
        asyncio.run(generate(make_args(), sample, {"max_new_tokens": 100}))
    assert sample.rollout_metrics["invalid_actions"] == 1  # the first answer stood inside the think
    engine = ScriptedEngine(tokenizer, [ANSWER.removeprefix("<think>")])
    sample = Sample(0, 0, "", TokenTrace(tokenizer.encode("Assistant: <think>\n")), label="Paris")
    with use_rollout_context(RolloutContext(engine, tokenizer)):
        asyncio.run(generate(make_args(), sample, {"max_new_tokens": 100}))
    assert reward(sample, tokenizer)["reward"] == 1.0


def test_a_partial_rollout_is_refused() -> None:
    tokenizer = make_byte_bpe_tokenizer()
    trace = TokenTrace([1, 2])
    trace.append_model([3], [-0.1])
    with (
        use_rollout_context(RolloutContext(ScriptedEngine(tokenizer, []), tokenizer)),
        pytest.raises(ValueError, match="partial rollouts are not supported"),
    ):
        asyncio.run(generate(make_args(), Sample(0, 0, "", trace), {"max_new_tokens": 5}))


def test_outside_of_a_rollout() -> None:
    with pytest.raises(LookupError, match="no rollout is under way"):
        asyncio.run(generate(make_args(), Sample(0, 0, "", TokenTrace([1])), {"max_new_tokens": 5}))


def test_a_refused_query_is_an_invalid_action(tokenizer: PreTrainedTokenizerBase) -> None:
    sample, _ = converse(tokenizer, [SEARCH, SEARCH, ANSWER], make_args("refuse"))
    assert (sample.status, sample.stop_reason) == (SampleStatus.COMPLETED, StopReason.ANSWERED)
    assert [segment.source for segment in sample.trace.segments] == ["model", "correction"] * 2 + ["model"]
    assert (sample.rollout_metrics["searches"], sample.rollout_metrics["invalid_actions"]) == (0, 2)
    assert "refused" in texts(sample, tokenizer)[1][1]
    sample, _ = converse(tokenizer, [SEARCH] * 3, make_args("refuse"))
    assert sample.stop_reason is StopReason.INVALID_ACTION_LIMIT


# --- Configuration ---


def test_defaults() -> None:
    config = SearchSettings.of(SimpleNamespace(custom_config={}))
    assert (config.max_turns, config.topk, config.search_concurrency, config.search_backend) == (2, 3, 256, "local")
    assert (config.local.search_url, config.local.proxy) == ("http://127.0.0.1:8000/retrieve", None)
    assert (config.google.snippet_only, config.google.proxy) == (True, None)
    assert (config.return_logprob, config.format_score, config.max_observation_tokens) == (True, 0.2, 500)
    assert SearchSettings.of(SimpleNamespace()) == config


def test_overrides_reach_into_sections() -> None:
    config = SearchSettings.of(make_args(search_backend="local", local={"search_url": "http://x/retrieve"}, topk=5))
    assert (config.local.search_url, config.local.proxy, config.topk) == ("http://x/retrieve", None, 5)


def test_a_change_in_place_is_seen() -> None:
    args = make_args()
    assert SearchSettings.of(args).topk == SearchSettings.of(args).topk == 3
    args.custom_config["search_r1"]["topk"] = 7
    assert SearchSettings.of(args).topk == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"search_backend": "gogle"}, "zhihu, searxng, or module.function"),
        ({"search_backend": "no.such"}, "search_backend no.such: looked for module no in"),
        ({"search_backend": "json.loads"}, "search_backend json.loads: expected `async def`, found `def`"),
        ({"top_k": 3}, "unknown key top_k; did you mean topk?"),
        (
            {"local": {"searchurl": "x"}},
            r"unknown key local.searchurl; did you mean search_url\? known are search_url, proxy",
        ),
        ({"local": None}, "local"),
        ({"topk": "3"}, "topk: expected a valid integer, found '3'"),
        ({"topk": 0}, "topk: expected greater than or equal to 1, found 0"),
        ({"score": float("nan")}, "score: expected a finite number, found nan"),
        ([3], r"search_r1: expected a section of keys and values, found \[3\]"),
        ({"local": {"search_url": "localhost:8000"}}, "local.search_url: has no scheme.*found 'localhost:8000'"),
        ({"local": {"proxy": "s3cret@host:99999"}}, "local.proxy: has no scheme"),
        ({"search_backend": "backend_that_takes_one.search"}, r"found `backend_that_takes_one.search\(query\)`"),
        ({"search_backend": "backend_that_is_broken.search"}, "failed to import: ZeroDivisionError"),
        ({"return_logprob": False}, "return_logprob"),
        ({"google": {"api_key": "s3cret"}}, "a key belongs in an environment variable"),
    ],
)
def test_a_wrong_configuration_says_what_is_known(
    override: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "backend_that_takes_one.py").write_text("async def search(query): ...\n")
    (tmp_path / "backend_that_is_broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=message) as caught:
        SearchSettings.of(SimpleNamespace(custom_config={"search_r1": override}))
    assert "s3cret" not in str(caught.value)


def test_a_key_from_a_file_loses_its_line_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "s3cret\n")
    assert SearchSettings.of(SimpleNamespace()).google.key() == "s3cret"


def test_google_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_byte_bpe_tokenizer()
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(ValueError, match="export SERPER_API_KEY"):
        converse(tokenizer, [SEARCH], make_args(search_backend="google"))
    with pytest.raises(ValueError, match="export SERPER_API_KEY"):
        check_args(make_args(search_backend="google"))
    monkeypatch.setenv("SERPER_API_KEY", "x")
    check_args(make_args(search_backend="google"))
