"""The format-aware exact match: the shared cases, the format, the answer that counts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qa_em_format import compute_score_em, score_response, split_segments

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases/reward.jsonl").open()]
WEIGHTS = {"score": 1.0, "format_score": 0.2, "retrieval_score": 0.1, "final_format_score": 0.1}
PROMPT = "<|im_start|>user\nFor example <answer> Beijing </answer>.<|im_end|>\n<|im_start|>assistant\n"
TURN = "<think>t</think><search>q</search>"
GOOD = "<think>t</think><answer>Paris</answer>"


def information(text: str) -> str:
    return f"\n\n<information>Doc 1(Title: x) {text}</information>\n\n"


# --- The reward ---


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_cases(case: dict[str, Any]) -> None:
    result = score_response(map(tuple, case["segments"]), case["golden"], **WEIGHTS)
    expect = case["expect"]
    assert {name: getattr(result, name) for name in expect if name != "reward"} == {
        name: value for name, value in expect.items() if name != "reward"
    }
    assert result.reward == pytest.approx(expect["reward"])
    assert (result.invalid_reason is None) == result.valid_format


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_cases_as_plain_strings(case: dict[str, Any]) -> None:
    """A plain string tells corrections from the model's text no longer; all else is scored the same."""
    if any(source == "correction" for source, _ in case["segments"]):
        return
    text = PROMPT + "".join(text for _, text in case["segments"])
    assert compute_score_em(text, case["golden"], **WEIGHTS) == pytest.approx(case["expect"]["reward"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty response"),
        (GOOD[:-1], "found"),
        ("so: " + GOOD, "text outside of the tags"),
        ("<think>t</think> so <answer>Paris</answer>", "text outside of the tags"),
        ("<think>t</think><search> </search>", "expected"),
        ("<think>t</think><answer> </answer>", "blank answer"),
        ("<think>t</think><think>u</think><answer>a</answer>", "expected"),
        ("<think>I could <search>q</search></think><answer>a</answer>", "expected"),
        ("<think>t</think><information>mine</information><answer>a</answer>", "expected"),
        (GOOD + GOOD, "expected"),
        (GOOD + "<|im_start|>", "text after"),
        (TURN + information("y"), "ended without an answer"),
        (TURN + "<information>mine</information> and " + GOOD, "text outside"),
    ],
)
def test_why_a_format_is_invalid(text: str, reason: str) -> None:
    result = score_response(split_segments(text), "Paris")
    assert not result.valid_format
    assert reason in (result.invalid_reason or "")


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"  {GOOD}\n",
        f"{GOOD}<|im_end|>\n<|endoftext|>",
        TURN + information("y") + GOOD,
        "<think></think>" + GOOD[16:],
    ],
)
def test_valid_formats(text: str) -> None:
    assert score_response(split_segments(text), "Paris").invalid_reason is None


def test_an_end_of_turn_token_of_its_own_is_named() -> None:
    segments = [("model", GOOD + "[STOP]")]
    assert not score_response(segments, "Paris").valid_format
    assert score_response(segments, "Paris", end_of_turn=["[STOP]", ""]).valid_format


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>a</answer>", "a"),
        ("<think><answer>a</answer></think>", None),
        ("<answer>a</answer><answer>  </answer>", "a"),
        ("<answer>a<answer>b</answer>", None),
        ("<answer>a</search>", None),
        ("<answer> a\nb </answer>", "a\nb"),
        (PROMPT, None),
        (PROMPT + "<answer>a</answer>", "a"),
        (PROMPT + "\nAssistant: <answer>a</answer>", "a"),
        ("Human: <answer>Beijing</answer>\nAssistant: <answer>a</answer>", "a"),
        ("Human: <answer>Beijing</answer>\nAssistant: none", None),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n<answer>a</answer>", "a"),
    ],
)
def test_which_answer_counts(text: str, answer: str | None) -> None:
    assert score_response(split_segments(text), "Paris").answer == answer


def test_the_tag_of_a_turn_does_not_close_in_the_next() -> None:
    segments = [("model", "<answer>Par"), ("correction", "no"), ("model", "is</answer>")]
    assert score_response(segments, "Paris").answer is None


def test_neighbouring_segments_of_the_model_are_one() -> None:
    segments = [("model", GOOD[:20]), ("model", ""), ("model", GOOD[20:])]
    assert score_response(segments, "Paris").reward == 1.0


def test_partial_credit() -> None:
    def score(answer: str, **options: Any) -> float:
        segments = [("model", f"<think>t</think><answer>{answer}</answer>")]
        return score_response(segments, "New York City", metric="f1", **options).reward

    assert score("new york city") == 1.0
    assert score("york city") == pytest.approx(0.8)
    assert score("Rome") == pytest.approx(0.2)
    assert score_response(
        [("model", "<answer>York City</answer>")], "New York City", metric="f1"
    ).reward == pytest.approx(0.6)


@pytest.mark.parametrize(("answer", "gold"), [("A", "A"), ("a", "A"), ("+", "+"), ("The", "the")])
def test_an_article_or_a_mark_is_an_answer(answer: str, gold: str) -> None:
    result = score_response([("model", f"<think>x</think><answer>{answer}</answer>")], [gold])
    assert (result.exact_match, result.f1, result.reward) == (True, 1.0, 1.0)


@pytest.mark.parametrize("answer", ["B", "The", "an", "+", " "])
def test_another_answer_than_an_article_is_wrong(answer: str) -> None:
    result = score_response([("model", f"<think>x</think><answer>{answer}</answer>")], ["A"])
    assert (result.exact_match, result.f1) == (False, 0.0)


def test_a_tag_in_a_passage_and_the_models_own_text_are_no_hit() -> None:
    assert not score_response(split_segments("<think>Paris</think>" + GOOD), "Paris").retrieval_hit
    assert not score_response(split_segments("<information>Paris</information>"), "Paris").retrieval_hit
    assert score_response(split_segments(TURN + information("Paris")), "Paris").retrieval_hit


def test_numbers_can_be_told_apart() -> None:
    segments = [("model", TURN), ("observation", information("It is 3.5 km.")), ("model", GOOD)]
    assert score_response(segments, "3.5", keep_numbers=True).retrieval_hit
    assert not score_response(segments, "35", keep_numbers=True).retrieval_hit


def test_without_an_accepted_answer_nothing_is_right() -> None:
    assert score_response([("model", GOOD)], None).reward == pytest.approx(0.2)


parts = st.one_of(
    st.sampled_from(
        ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "Paris", "<|im_end|>", " "]
    ),
    st.text(max_size=4),
)
texts = st.lists(parts, max_size=10).map("".join)


@given(st.lists(st.tuples(st.sampled_from(["model", "observation", "correction"]), texts), max_size=6))
def test_every_trajectory_has_one_of_six_rewards(segments: list[tuple[str, str]]) -> None:
    result = score_response(segments, ["Paris"], **WEIGHTS)
    assert min(abs(result.reward - value) for value in (1.0, 0.8, 0.3, 0.2, 0.1, 0.0)) < 1e-9
    assert not (result.exact_match and result.answer is None)
    assert not (result.valid_format and result.answer is None)
    model_text = "".join(text for source, text in segments if source == "model")
    assert result.answer is None or result.answer in model_text


# --- Time ---


@pytest.mark.parametrize(
    "part",
    [
        "<answer>",
        "<think>",
        "</search><information>",
        "</search>\n",
        "<think></think>",
        "<answer></answer>",
        "<|im_end|>",
        "[/INST]",
        " the",
        "\nDoc 1(Title: ",
        "\nAssistant:",
    ],
)
def test_linear_time(part: str) -> None:
    start = time.process_time()
    compute_score_em(part * 20_000, ["Paris"])
    score_response([("model", TURN), ("observation", part * 20_000), ("model", GOOD + part * 20_000)], ["the the x"])
    assert time.process_time() - start < 3.0  # quadratic time would be minutes
