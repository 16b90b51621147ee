"""Finds rows that no answer can win because their label holds no answer. Only the reward hook knows more of labels."""

from __future__ import annotations

import json
from typing import Any

ANSWER_KEYS = ("ground_truth", "target", "targets", "golden_answers", "answers", "answer", "text", "value", "aliases")
"""Keys under which labels of the usual data sets hold their answers."""


def is_blank(label: Any) -> bool:
    """Whether a label is null, NaN or empty, or has only such values in the places where data sets keep answers."""
    if isinstance(label, str):
        return not label.strip() or _spells_blank(label)
    if isinstance(label, dict):
        answers = [label[key] for key in ANSWER_KEYS if key in label]
        return all(map(is_blank, answers)) if answers else not label
    if isinstance(label, list | tuple):
        return all(map(is_blank, label))
    return label is None or label != label  # only NaN differs from itself


def _spells_blank(text: str) -> bool:
    """Whether a text is the JSON of an empty list or dictionary."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(decoded, list | dict) and is_blank(decoded)
