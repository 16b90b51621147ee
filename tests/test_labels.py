"""Which labels hold no answer, whatever the reward hook makes of them, and how a label reads."""

from typing import Any

import pytest

from sleuth.labels import as_text, is_blank


@pytest.mark.parametrize(
    "label",
    [
        None,
        float("nan"),
        "",
        " ",
        [],
        {},
        [None, ""],
        "[]",
        '{"target": []}',
        {"target": None},
        {"ground_truth": {"target": []}, "style": "rule"},
        {"target": None, "golden_answers": []},
        {"value": None, "aliases": []},
    ],
)
def test_no_answer(label: Any) -> None:
    assert is_blank(label)


@pytest.mark.parametrize(
    "label",
    [
        0,
        0.0,
        False,
        84,
        "Paris",
        "[",
        "{}x",
        "0",
        ["", "a"],
        {"style": "rule"},
        {"target": None, "golden_answers": ["Paris"]},
        {"ground_truth": {"target": ["2"]}},
        {"ground_truth": {"schedule": None}},
        {"text": ["a"], "answer_start": [3]},
    ],
)
def test_an_answer_or_what_only_the_hook_can_tell(label: Any) -> None:
    assert not is_blank(label)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("Ann", "Ann"),
        ({"target": "Ann"}, "Ann"),
        ({"ground_truth": {"target": ["Ann", "Anne"]}}, "Ann | Anne"),
        ({"text": ["Ann"], "answer_start": [3]}, "Ann"),
        ({"other": 1}, "{'other': 1}"),
        (None, "None"),
    ],
)
def test_a_label_for_people(label: Any, text: str) -> None:
    assert as_text(label) == text
