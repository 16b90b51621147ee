"""Answers: SQuAD's own normalisation, what is left where it leaves nothing, passages, labels as data sets hold them."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import string
import time
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sleuth.answers import GoldAnswers, answer_key, em_check, normalize_answer, parse_golden_answers


def information(text: str) -> str:
    return f"\n\n<information>Doc 1(Title: x) {text}</information>\n\n"


def token_f1(prediction: str, label: Any) -> float:
    return GoldAnswers.of(label).compare(prediction)[1]


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
    for gold, hit in (("3.5", True), ("5", False), ("35", False)):
        assert GoldAnswers.of(gold, keep_numbers=True).found_in([information("It is 3.5 km.")]) is hit


# --- Where normalisation leaves nothing ---


@pytest.mark.parametrize(
    ("prediction", "gold", "right"),
    [
        ("A", "A", True),
        ("a", "A", True),
        (" The\n", "the", True),
        ("A.", "A", True),
        ("(A)", "A", True),
        ("+", "+", True),
        ("＋", "+", True),
        ("−", "-", True),
        ("the  A", "The a", True),
        ("...", "...", True),
        ("€", "€", True),
        ("+\u200b", "+", True),
        ("B", "A", False),
        ("The", "A", False),
        ("", "A", False),
        (".", "A", False),
        ("A+", "A", False),
        ("'A'", "A", True),
        ("\u2018A\u2019", "A", True),
        ("\u300cA\u300d\u3002", "A", True),
        ("\u00abA\u00bb", "A", True),
        ("A+", "A-", False),
        ("-", "+", False),
        ("€", "$", False),
        ("the", "The The", False),
        ("?", "!", False),
        ("A", "Paris", False),
        ("the Paris", "the", False),
    ],
)
def test_what_was_there_before_is_compared(prediction: str, gold: str, right: bool) -> None:
    assert em_check(prediction, [gold]) is right
    assert em_check(prediction, [gold], keep_numbers=True) is right
    assert token_f1(prediction, [gold]) == float(right)
    assert em_check(prediction, ["Rome", gold]) is right


def test_token_f1() -> None:
    assert token_f1("the big apple", ["apple", "pear"]) == pytest.approx(2 / 3)
    assert token_f1("A pear", ["A", "pear tree"]) == pytest.approx(2 / 3)
    assert token_f1("", ["A"]) == 0.0


@given(st.text(), st.booleans())
def test_every_visible_text_equals_itself(text: str, keep_numbers: bool) -> None:
    key = answer_key(text, keep_numbers)
    golden = parse_golden_answers([text])
    if golden == [text]:  # not a text that spells a label
        assert em_check(text, golden, keep_numbers) is (key != "")
    assert key == " ".join(key.split())


@given(st.text("Aa+-.’ the", max_size=6), st.text("Aa+-.’ the", max_size=6))
def test_normalised_answers_are_compared_as_ever(one: str, other: str) -> None:
    if normalize_answer(one) or normalize_answer(other):
        assert (answer_key(one) == answer_key(other)) is (normalize_answer(one) == normalize_answer(other))


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
        ("The A side", "A", False),
        ("1 + 1", "+", False),
    ],
)
def test_hits_are_whole_words(passage: str, gold: str, hit: bool) -> None:
    assert GoldAnswers.of([gold]).found_in([information(passage)]) is hit


def test_no_hit_across_passages() -> None:
    text = information("New\nDoc 2(Title: York) City")
    assert not GoldAnswers.of("New York").found_in([text])
    assert GoldAnswers.of("York City").found_in([text])


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
        ([], []),
        ("", []),
        ([" ", "a"], ["a"]),
        (pd.NA, []),
        (pd.NaT, []),
        (datetime.date(1929, 3, 20), ["1929-03-20"]),
        (Decimal("3.50"), ["3.50"]),
        (np.array("a"), ["a"]),
        (np.str_("a"), ["a"]),
        (np.bool_(True), ["True"]),
        # Python's and numpy's spelling
        ("['Paris', 'paris']", ["Paris", "paris"]),
        ("['Paris', None, -3.5]", ["Paris", "-3.5"]),
        (str(np.array(["Paris", "rock 'n' roll"])), ["Paris", "rock 'n' roll"]),
        (repr(np.array(["a", "b"], dtype=object)), ["a", "b"]),
        (repr([np.str_("a"), np.int64(7)]), ["a", "7"]),
        ("{'target': array(['a'], dtype=object)}", ["a"]),
        ("{'ground_truth': {'target': ['a']}, 'style': 'rule'}", ["a"]),
        ("('a', 'b')", ["a", "b"]),
        ("(1, 2)", ["(1, 2)"]),
        ("(1)", ["(1)"]),
        ("{1, 2}", ["{1, 2}"]),
        ("['a'] + ['b']", ["['a'] + ['b']"]),
        ("[f'{a}']", ["[f'{a}']"]),
        ("{**{'target': 1}}", ["{**{'target': 1}}"]),
        ("[citation needed]", ["[citation needed]"]),
        ('"Heroes"', ['"Heroes"']),
        # JSON within JSON
        ('"[\\"a\\"]"', ["a"]),
        ({"ground_truth": '{"target": ["a"]}'}, ["a"]),
        ('{"target": null}', []),
        # SQuAD's shapes
        ({"text": ["a", "b", "a"], "answer_start": [3, 7, 9]}, ["a", "b"]),
        ({"text": np.array(["a"], dtype=object), "answer_start": np.array([3])}, ["a"]),
        ({"text": [], "answer_start": []}, []),
        ([{"text": "a", "answer_start": 3}, {"text": "b", "answer_start": 7}], ["a", "b"]),
        # TriviaQA's
        ({"value": "A1", "aliases": ["A2"], "normalized_aliases": ["a1"], "type": "Numerical"}, ["A1", "A2", "a1"]),
        ({"answer": {"value": "a", "aliases": []}}, ["a"]),
        ({"answer": "a", "answer_aliases": ["b"], "id": "x"}, ["a", "b"]),
        # Arrow's map
        ([("target", ["a"])], ["a"]),
        ([("style", "rule"), ("target", ["a", "b"])], ["a", "b"]),
        ([["style", "rule"], ["target", ["a"]]], ["a"]),
        ([["target", "a"]], ["a"]),
        ([["a", "b"], ["c", "d"]], ["a", "b", "c", "d"]),
        # a null key
        ({"target": None, "golden_answers": ["a"]}, ["a"]),
        ({"target": float("nan"), "golden_answers": [], "answers": ["a"]}, ["a"]),
        ({"target": None}, []),
    ],
)
def test_labels(label: Any, answers: list[str]) -> None:
    assert parse_golden_answers(label) == answers


def test_a_label_without_answers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"needs one of .*target.* found 'style'"):
        parse_golden_answers({"style": "rule"})


@pytest.mark.parametrize(
    "label", [{}, [{"x": 1}], [("style", "rule")], [["style", ["rule"]]], {"target": {"style": "rule"}}, '[{"x": 1}]']
)
def test_an_unknown_dictionary_is_an_error_wherever_it_stands(label: Any) -> None:
    with pytest.raises(ValueError, match="needs one of the keys"):
        parse_golden_answers(label)


@pytest.mark.parametrize("label", [object(), [object()], {"target": 1j.__add__}])
def test_an_unknown_type_is_an_error(label: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a label that is .* found (object|method)"):
        parse_golden_answers(label)


def test_a_label_nested_without_end_is_an_error() -> None:
    label: list[Any] = []
    label.append(label)
    with pytest.raises(ValueError, match="too deeply"):
        parse_golden_answers(label)


# Answers are of letters that stand in no key, so that a key among the answers shows.
words = st.text("QXZ é0", min_size=1, max_size=4)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words)
names = st.sampled_from(
    ["ground_truth", "target", "golden_answers", "answers", "value", "aliases", "text", "style", "id"]
)


def dictionaries(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    made = st.dictionaries(names, values, min_size=1, max_size=4)
    pairs = st.lists(st.tuples(names, st.lists(values, max_size=2)), min_size=1, max_size=3)
    return st.one_of(made, pairs, made.map(json.dumps), made.map(repr), pairs.map(json.dumps), pairs.map(repr))


labels = st.recursive(scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), dictionaries(inner)), max_leaves=8)


@given(labels)
def test_a_key_never_becomes_an_answer(label: Any) -> None:
    try:
        answers = parse_golden_answers(label)
    except ValueError:
        return
    assert all(isinstance(answer, str) and answer.strip() for answer in answers)
    # A text that spells a dictionary without a known key is an answer, as a whole.
    assert not {"ground_truth", "target", "value", "aliases", "text", "style", "id"} & set(answers)


json_like = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=9), inner, max_size=4)),
)


@given(json_like)
def test_every_label_is_read_or_refused(label: Any) -> None:
    for form in (label, json.dumps(label), repr(label), {"target": label}):
        with contextlib.suppress(ValueError):
            assert all(isinstance(answer, str) for answer in parse_golden_answers(form))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text.strip()), min_size=1))
def test_a_list_reads_the_same_in_every_spelling(answers: list[str]) -> None:
    expected = parse_golden_answers(answers)
    array = np.array(answers, dtype=object)
    for form in (array, json.dumps(answers), repr(answers), repr(array), json.dumps(json.dumps(answers))):
        assert parse_golden_answers(form) == expected
    for label in ({"target": answers}, {"text": answers, "answer_start": []}, [("golden_answers", answers)]):
        assert parse_golden_answers(label) == expected


@pytest.mark.parametrize("part", ["[", "{", "(", "['a',", "{'a':", "array(", "['", "[-", '"', "'a' "])
def test_hostile_texts_are_read_in_linear_time(part: str) -> None:
    start = time.process_time()
    for text in (part * 100, part * 20_000, "[" + part * 20_000, part * 20_000 + "]"):
        parse_golden_answers([text])
    assert time.process_time() - start < 3.0


def test_no_golden_answer_matches_nothing() -> None:
    assert not em_check("", None)
    assert not em_check("None", None)
    assert not em_check("", ["", " ", "\u200b"])
