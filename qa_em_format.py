"""Format-aware exact match: the reward of a search trajectory.

`score_response` scores a trajectory by its segments, so that a tag in a passage, in the prompt or in a
correction never counts; `compute_score_em` scores a plain string in the same way. The reward of a trajectory:

    | answer                 | format valid                               | format invalid       |
    |------------------------|--------------------------------------------|----------------------|
    | right                  | score                                      | score - format_score |
    | wrong                  | format_score (+ retrieval_score on a hit)  | final_format_score   |
    | none                   | impossible                                 | 0                    |

`retrieval_score` and `final_format_score` are 0 unless set, where slime's example has 0.1: a passage may hold a short
answer by chance, and a wrong answer of broken format is worth no more than none.

`sleuth/answers.py` compares answers, finds them in passages, and reads labels. All functions take time linear in the
length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sleuth.answers import GoldAnswers, em_check, normalize_answer, parse_golden_answers

__all__ = ["compute_score_em", "em_check", "iter_actions", "normalize_answer", "parse_golden_answers", "score_response"]

TAG = re.compile(r"</?(?:think|search|information|answer)>")
END_OF_TURN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)
_CHAT_MARKER = re.compile(
    r"<\|im_start\|>assistant|<\|start_header_id\|>assistant<\|end_header_id\|>|<start_of_turn>model|<\|assistant\|>"
    r"|\[/INST\]"
)
_PLAIN_MARKER = re.compile(r"^(?:Assistant|ASSISTANT):", re.MULTILINE)
_OBSERVATION = re.compile(r"(?<=</search>)\s*<information>")

Segment = tuple[str, str]
"""A source (`model`, `observation` or `correction`) and its text."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The reward of a trajectory, and the reasons for it."""

    reward: float
    answer: str | None
    """The last answer that the model gave, or None."""
    exact_match: bool
    f1: float
    """Token F1 against the nearest gold answer, 0 to 1."""
    valid_format: bool
    invalid_reason: str | None
    retrieval_hit: bool
    """Whether a passage holds a gold answer, whatever the format."""


def score_response(
    segments: Iterable[Segment],
    golden_answers: Any,
    *,
    score: float = 1.0,
    format_score: float = 0.2,
    retrieval_score: float = 0.0,
    final_format_score: float = 0.0,
    metric: Literal["em", "f1"] = "em",
    keep_numbers: bool = False,
    end_of_turn: Sequence[str] = (),
) -> Breakdown:
    """Score a trajectory given as `(source, text)` segments.

    `golden_answers` may be any label that `parse_golden_answers` reads. With `metric="f1"` an answer that is not
    exactly right earns its token F1 if that is more than it would get otherwise. `keep_numbers`: see
    `normalize_answer`. `end_of_turn`: further texts of end-of-turn tokens, which may end a response of valid format.
    """
    segments = _merge(segments)
    golden = GoldAnswers.of(golden_answers, keep_numbers)
    answer = _last_answer(segments)
    exact_match, f1 = golden.compare(answer or "")
    reason = _format_error(segments, end_of_turn)
    hit = golden.found_in(text for source, text in segments if source == "observation")

    right = exact_match * score if metric == "em" else f1 * score
    if reason is None:
        wrong = format_score + (retrieval_score if hit else 0.0)
        reward = score if exact_match else max(wrong, right)
    else:
        wrong = final_format_score if answer is not None else 0.0
        reward = score - format_score if exact_match else max(wrong, right - format_score)
    return Breakdown(reward, answer, exact_match, f1, reason is None, reason, hit)


def compute_score_em(solution_str: str, ground_truth: Any, **options: Any) -> float:
    """The reward of a plain string: prompt and response, or a response alone.

    Only the text after the last assistant marker is scored; `<information>` right after a closed search
    counts as an observation. The options are those of `score_response`.
    """
    return score_response(split_segments(solution_str), ground_truth, **options).reward


# --- Tags ---


class Action(NamedTuple):
    """A closed `<search>` or `<answer>` outside of `<think>`."""

    name: str
    content: str
    """The text between the tags, trimmed."""
    well_formed: bool
    """Whether the content is not blank and contains no other protocol tag."""


def iter_actions(text: str) -> Iterator[Action]:
    """The closed actions outside of `<think>`, in order; none after a `<think>` that is never closed."""
    tags = list(TAG.finditer(text))
    closing = _closing_tags([tag[0] for tag in tags])
    i = 0
    while i < len(tags):
        name, end = tags[i][0][1:-1], closing[i]
        if name == "think":
            if end is None:
                return
            i = end
        elif name in ("search", "answer") and end is not None:
            content = text[tags[i].end() : tags[end].start()].strip()
            yield Action(name, content, well_formed=end == i + 1 and content != "")
            i = end
        i += 1


def _closing_tags(tags: Sequence[str]) -> list[int | None]:
    """For each tag the index of the next closing tag of the same name; None if there is none."""
    closing: list[int | None] = [None] * len(tags)
    latest: dict[str, int] = {}
    for i in range(len(tags) - 1, -1, -1):
        if tags[i].startswith("</"):
            latest[tags[i][2:-1]] = i
        else:
            closing[i] = latest.get(tags[i][1:-1])
    return closing


def _last_answer(segments: Sequence[Segment]) -> str | None:
    for source, text in reversed(segments):
        if source == "model" and "</answer>" in text:
            answers = [
                action.content for action in iter_actions(text) if action.name == "answer" and action.well_formed
            ]
            if answers:
                return answers[-1]
    return None


def _merge(segments: Iterable[Segment]) -> list[Segment]:
    """The segments without empty ones, with neighbours of the same source joined."""
    runs: list[tuple[str, list[str]]] = []
    for source, text in segments:
        if text and runs and runs[-1][0] == source:
            runs[-1][1].append(text)
        elif text:
            runs.append((source, [text]))
    return [(source, "".join(texts)) for source, texts in runs]


def split_segments(solution_str: str) -> list[Segment]:
    """The segments of a plain string, from its last assistant marker on."""
    markers = list(_CHAT_MARKER.finditer(solution_str)) or list(_PLAIN_MARKER.finditer(solution_str))
    start = markers[-1].end() if markers else 0
    segments: list[Segment] = []
    while opening := _OBSERVATION.search(solution_str, start):
        end = solution_str.find("</information>", opening.end())
        if end < 0:
            break
        end += len("</information>")
        segments += [
            ("model", solution_str[start : opening.start()]),
            ("observation", solution_str[opening.start() : end]),
        ]
        start = end
    rest = solution_str[start:]
    return [*segments, ("model", rest)] if rest.strip() else segments


# --- Format ---


def _format_error(segments: Sequence[Segment], end_of_turn: Sequence[str] = ()) -> str | None:
    """Why the segments do not have the form (think, search, observation)* think, answer; None if they have it."""
    if not segments:
        return "empty response"
    if any(source == "correction" for source, _ in segments):
        return "an invalid action was corrected"
    for i, (source, text) in enumerate(segments):
        if (source == "model") != (i % 2 == 0):
            return f"segment {i} is of the {source}"
        if source == "model":
            last = i == len(segments) - 1
            if error := _turn_error(text, "answer" if last else "search", end_of_turn):
                return f"turn {i // 2}: {error}"
    return "ended without an answer" if len(segments) % 2 == 0 else None


def _turn_error(text: str, action: str, end_of_turn: Sequence[str]) -> str | None:
    expected = ["<think>", "</think>", f"<{action}>", f"</{action}>"]
    tags = list(TAG.finditer(text))
    found = [tag[0] for tag in tags]
    if found != expected:
        return f"expected {' '.join(expected)}, found {' '.join(found[:8]) or 'no tag'}"
    outside = text[: tags[0].start()], text[tags[1].end() : tags[2].start()]
    if any(part.strip() for part in outside):
        return "text outside of the tags"
    if not text[tags[2].end() : tags[3].start()].strip():
        return f"blank {action}"
    if _without_end_of_turn(text[tags[3].end() :], end_of_turn):
        return f"text after </{action}>"
    return None


def _without_end_of_turn(tail: str, more: Sequence[str]) -> str:
    tail = tail.strip()
    if not tail:
        return tail
    endings = (*END_OF_TURN, *filter(None, more))
    while ending := next((ending for ending in endings if tail.startswith(ending)), None):
        tail = tail[len(ending) :].lstrip()
    return tail
