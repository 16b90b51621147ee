"""Compares evaluations question by question: whether they can be compared, differences with tests, what changed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sleuth.labels import as_text
from sleuth.metrics.rollout_metrics import data_source, evaluation_values
from sleuth.rollout.hook_runner import UNUSABLE
from sleuth.sample import Sample
from tools.evaluation.answers import Evaluation, differences, sample_of
from tools.evaluation.statistics import Difference, Tally, mcnemar, paired_difference
from tools.evaluation.summary import ALL, Question, by_question, numbers, tally

KINDS = {
    "data": ("data",),
    "prompts": ("prompts",),
    "sampling": ("sampling",),
    "search": ("hooks", "hook_settings"),
}
"""What must agree, by the name under which a difference is allowed, and the groups of settings that it covers."""
SHOWN = 4

Key = tuple[int | None, str]
"""A question: the row of its file, and its label."""


@dataclass(frozen=True, slots=True)
class Part:
    """One set at one temperature of an evaluation: its questions, and the trajectories that failed by question."""

    name: str
    temperature: float
    questions: dict[Key, Question]
    failed: dict[Key, list[Sample]]

    def tally(self, keys: Sequence[Key]) -> Tally:
        """The measures of these questions, in this order."""
        renumbered = [_renumbered(self.questions[key], number) for number, key in enumerate(keys)]
        lost = [sample for number, key in enumerate(keys) for sample in _renumbered(self.failed.get(key, []), number)]
        return tally(renumbered, lost)


def _renumbered(samples: Question, number: int) -> Question:
    for sample in samples:
        sample.group_index = number
    return samples


def parts_of(evaluation: Evaluation) -> dict[tuple[str, float], Part]:
    """The parts of an evaluation, by set and temperature."""
    samples: dict[tuple[str, float], list[Sample]] = {}
    for record in evaluation.records:
        samples.setdefault((record["set"], record["temperature"]), []).append(sample_of(record))
    return {place: _part(*place, found) for place, found in samples.items()}


def _part(name: str, temperature: float, samples: list[Sample]) -> Part:
    answers = by_question([sample for sample in samples if sample.status not in UNUSABLE])
    failed: dict[Key, list[Sample]] = {}
    for sample in samples:
        if sample.status in UNUSABLE:
            failed.setdefault(key_of(sample), []).append(sample)
    return Part(name, temperature, {key_of(question[0]): question for question in answers}, failed)


def key_of(sample: Sample) -> Key:
    return sample.row, json.dumps(sample.label, sort_keys=True, default=str)


def check_comparable(first: Evaluation, second: Evaluation, allowed: Collection[str]) -> None:
    """ValueError, with what differs and the remedy, unless only models, and what is `allowed`, differ."""
    for kind, groups in KINDS.items():
        changed = [
            line for group in groups for line in differences(*({group: e.settings.get(group)} for e in (first, second)))
        ]
        if kind == "prompts" and first.settings.get("data") != second.settings.get("data"):
            changed = [line for line in changed if not line.startswith("prompts.texts.")]  # told as data
        if changed and kind not in allowed:
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            raise ValueError(
                f"{first.path} and {second.path} differ in more than the model: {'; '.join(changed[:SHOWN])}{more}; "
                f"evaluate with the same settings, or add --allow {kind} if that is what is compared"
            )


@dataclass(frozen=True)
class Comparison:
    """The same questions in several evaluations; differences are to the first."""

    title: str
    keys: list[Key]
    left_out: int
    """Questions that not all have."""
    parts: list[Part]

    @cached_property
    def scopes(self) -> dict[str, list[Key]]:
        """The questions of each data source, and all."""
        scopes: dict[str, list[Key]] = {}
        for key in self.keys:
            scopes.setdefault(data_source(self.parts[0].questions[key][0]), []).append(key)
        return dict(sorted(scopes.items())) | {ALL: self.keys}

    @cached_property
    def tallies(self) -> dict[str, list[Tally]]:
        """For each scope the measures of each evaluation."""
        return {scope: [part.tally(keys) for part in self.parts] for scope, keys in self.scopes.items()}

    def measures(self, number: int, scope: str = ALL) -> dict[str, dict[str, float]]:
        """Of evaluation `number`, each measure: value, low and high."""
        found = self.tallies[scope][number]
        values: dict[str, dict[str, float]] = numbers(found, found.means(), found.draws)["measures"]
        return values

    def differences(self, other: int, scope: str = ALL) -> dict[str, Difference]:
        """Of evaluation `other` to the first, each measure."""
        return paired_difference(self.tallies[scope][0], self.tallies[scope][other])

    def changed(self, other: int, measure: str = "em") -> tuple[list[Key], list[Key]]:
        """The questions that `other` does better than the first, and those that it does worse, by their mean."""
        better: list[Key] = []
        worse: list[Key] = []
        for key in self.keys:
            before, after = (_mean(self.parts[number].questions[key], measure) for number in (0, other))
            if before is not None and after is not None and before != after:
                (better if after > before else worse).append(key)
        return better, worse

    def single(self) -> bool:
        """Whether every question has one answer, so that right and wrong can be counted."""
        return all(len(part.questions[key]) == 1 for part in self.parts for key in self.keys)

    def p_value(self, other: int) -> tuple[str, float]:
        """The paired test of exact match between `other` and the first: its name and p."""
        better, worse = self.changed(other)
        if self.single():
            return "McNemar's exact test", mcnemar(len(worse), len(better))
        return "paired bootstrap", self.differences(other)["em"].p


def _mean(question: Question, measure: str) -> float | None:
    values = [found[measure] for found in map(evaluation_values, question) if measure in found]
    return float(np.mean(values)) if values else None


def compare(evaluations: Sequence[Evaluation]) -> Iterator[Comparison]:
    """A comparison for each set and temperature that all have; ValueError if there is none, or no shared question."""
    parts = [parts_of(evaluation) for evaluation in evaluations]
    shared = [place for place in parts[0] if all(place in others for others in parts)]
    pairs = [[found[place] for found in parts] for place in shared]
    if not pairs and all(len(found) == 1 for found in parts):
        pairs = [[next(iter(found.values())) for found in parts]]
    if not pairs:
        listed = "; ".join(
            f"{evaluation.path} has {', '.join(f'{name} at temperature {t:g}' for name, t in found) or 'none'}"
            for evaluation, found in zip(evaluations, parts, strict=True)
        )
        raise ValueError(f"expected a set and temperature that all evaluations have, found none: {listed}")
    for found in pairs:
        yield _comparison(found)


def _comparison(parts: list[Part]) -> Comparison:
    keys = [key for key in parts[0].questions if all(key in part.questions for part in parts)]
    everything = {key for part in parts for key in part.questions}
    titles = dict.fromkeys(f"{part.name}, temperature {part.temperature:g}" for part in parts)
    if not keys:
        raise ValueError(f"{' and '.join(titles)}: expected questions that all evaluations have, found none in common")
    return Comparison(" and ".join(titles), keys, len(everything) - len(keys), parts)


def described(question: Question) -> Mapping[str, Any]:
    """A question in words, for a list: where it is, what is right, what was answered."""
    answers = [sample.notes.get("answer") for sample in question]
    return {
        "where": question[0].where,
        "label": as_text(question[0].label),
        "answers": [("nothing" if answer is None else str(answer)) for answer in answers],
    }
