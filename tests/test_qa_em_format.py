"""The format-aware exact match: the shared cases, SQuAD's own normalisation, labels as parquet gives them."""

from __future__ import annotations

import json
import re
import string
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qa_em_format import (
    compute_score_em,
    em_check,
    extract_solution,
    is_retrieval_correct,
    is_valid_sequence,
    normalize_answer,
    parse_golden_answers,
    score_response,
    token_f1,
)

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
    valid, found = is_valid_sequence(text)
    assert not valid
    assert reason in found


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
    assert is_valid_sequence(text) == (True, "valid")


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
def test_extract_solution(text: str, answer: str | None) -> None:
    assert extract_solution(text) == answer


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
    assert token_f1("the big apple", ["apple", "pear"]) == pytest.approx(2 / 3)
    assert token_f1("the", ["the"]) == 0.0


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


# --- Normalisation ---


def squad_normalize(text: str) -> str:
    """As the official SQuAD evaluation script states it."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


@given(st.text(st.characters(max_codepoint=127)))
def test_agrees_with_squad_on_ascii(text: str) -> None:
    assert normalize_answer(text) == squad_normalize(text)


@given(st.lists(st.sampled_from(["the", "a", "An", "U.S.", "-", "x_y", "3.5", "\n", "'s", "Paris"])).map(" ".join))
def test_agrees_with_squad_on_words(text: str) -> None:
    assert normalize_answer(text) == squad_normalize(text)


@given(st.text())
def test_any_text_can_be_normalised(text: str) -> None:
    normal = normalize_answer(text)
    assert normal == " ".join(normal.split())
    assert normalize_answer(text, keep_numbers=True) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("北京。", "北京"),
        ("２０１７", "2017"),
        ("Schindler’s List", "Schindler's List"),
        ("Schindler´s List", "Schindler's List"),
        ("1914–1918", "1914-1918"),
        ("−5", "-5"),
        ("STRASSE", "Straße"),
        ("«Paris»", "Paris"),
        ("¿Qué?", "qué"),
        ("new\u00a0york", "New York"),
        ("co\u00adoperate", "cooperate"),
        ("\ufeffParis\u200b", "Paris"),
        ("Google™", "google"),
        ("e\u0301", "é"),
        ("€5", "$5"),
        ("ﬁne", "fine"),
    ],
)
def test_unicode(one: str, other: str) -> None:
    assert normalize_answer(one) == normalize_answer(other) != ""
    assert em_check(one, [other])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.5", "3.5"),
        ("35", "35"),
        ("-5", "-5"),
        ("−5 °C", "-5 °c"),
        ("1914-1918", "19141918"),
        ("1,000.", "1000"),
        ("U.S. v. 5", "us v 5"),
        ("No.5", "no5"),
        ("-.5", "-.5"),
        ("wait...5", "wait5"),
    ],
)
def test_keep_numbers(text: str, expected: str) -> None:
    assert normalize_answer(text, keep_numbers=True) == expected


def test_numbers_apart() -> None:
    assert em_check("3.5", "35")
    assert not em_check("3.5", "35", keep_numbers=True)
    assert not em_check("-5", "5", keep_numbers=True)
    assert em_check("The 3.5!", "3.5", keep_numbers=True)
    segments = [("model", TURN), ("observation", information("It is 3.5 km.")), ("model", GOOD)]
    assert score_response(segments, "3.5", keep_numbers=True).retrieval_hit
    assert not score_response(segments, "5", keep_numbers=True).retrieval_hit
    assert not score_response(segments, "35", keep_numbers=True).retrieval_hit


# --- Hits ---


@pytest.mark.parametrize(
    ("passage", "gold", "hit"),
    [
        ("take the bus", "US", False),
        ("the U.S. army", "US", True),
        ("(Paris)", "Paris", True),
        ("Paris's streets", "Paris", True),
        ("Paris.Lyon", "Lyon", True),
        ("don't", "don", False),
        ("in 1914–1918", "1918", True),
        ("in 19181", "1918", False),
        ("The Lord of the Rings", "Lord of Rings", True),
        ("中国的首都是北京，人口很多", "北京", True),
        ("美国NASA宣布", "NASA", True),
        ("서울은 수도이다", "서울", True),
        ("ประเทศไทยกรุงเทพ", "กรุงเทพ", True),
        ("Москвабад", "Москва", False),
        ("हिन्दी", "हिन", False),
        ("anything", "?!", False),
        ("Doc", "Title", False),
        ("anything", "Doc 1", False),
        ("anything", "information", False),
        ("the Beatles", "The Beatles", True),
    ],
)
def test_hits_are_whole_words(passage: str, gold: str, hit: bool) -> None:
    assert is_retrieval_correct(TURN + information(passage), gold) is hit


def test_no_hit_across_passages() -> None:
    text = TURN + information("New\nDoc 2(Title: York) City")
    assert not is_retrieval_correct(text, "New York")
    assert is_retrieval_correct(text, "York City")


def test_what_the_model_writes_is_no_hit() -> None:
    assert not is_retrieval_correct("<think>Paris</think>" + GOOD, "Paris")
    assert not is_retrieval_correct("<information>Paris</information>", "Paris")


# --- Labels ---


@pytest.mark.parametrize(
    ("label", "answers"),
    [
        ("Paris", ["Paris"]),
        (["a", "b", "a"], ["a", "b"]),
        (np.array(["a", "b"], dtype=object), ["a", "b"]),
        (np.array([1, 2]), ["1", "2"]),
        (np.int64(7), ["7"]),
        (np.float64(7.0), ["7"]),
        (3.5, ["3.5"]),
        (None, []),
        (float("nan"), []),
        ([None, "a"], ["a"]),
        (True, ["True"]),
        ({"target": np.array(["a"], dtype=object)}, ["a"]),
        ({"ground_truth": {"target": ["a"]}, "style": "rule"}, ["a"]),
        ('{"ground_truth": {"target": ["a", "b"]}}', ["a", "b"]),
        ('["a", "b"]', ["a", "b"]),
        ("[a]", ["[a]"]),
        ('{"x": 1}', ['{"x": 1}']),
        ("{}", ["{}"]),
        (b"caf\xc3\xa9", ["café"]),
        ([["a"], ("b",)], ["a", "b"]),
        ("7", ["7"]),
    ],
)
def test_labels(label: Any, answers: list[str]) -> None:
    assert parse_golden_answers(label) == answers


def test_a_label_without_answers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"needs one of .* found .'style'"):
        parse_golden_answers({"style": "rule"})


def test_no_golden_answer_matches_nothing() -> None:
    assert not em_check("", None)
    assert not em_check("None", None)
    assert score_response([("model", GOOD)], None).reward == pytest.approx(0.2)


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
