"""Finds rows that no answer can win because their label holds no answer. Only the reward hook knows more of labels."""

from __future__ import annotations

from typing import Any

from sleuth.data.messages import decoded

ANSWER_KEYS = ("ground_truth", "target", "targets", "golden_answers", "answers", "answer", "text", "value", "aliases")
"""Keys under which labels of the usual data sets hold their answers."""


def is_blank(label: Any) -> bool:
    """Whether a label is null, NaN or empty, or has only such values in the places where data sets keep answers."""
    if isinstance(label, str):
        spelled = decoded(label)
        return not label.strip() or (spelled is not label and is_blank(spelled))
    if isinstance(label, dict):
        answers = [label[key] for key in ANSWER_KEYS if key in label]
        return all(map(is_blank, answers)) if answers else not label
    if isinstance(label, list | tuple):
        return all(map(is_blank, label))
    return label is None or label != label  # only NaN differs from itself
