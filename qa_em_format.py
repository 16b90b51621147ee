"""Format-aware exact match: what a search trajectory is worth.

`score_response` scores a trajectory by its segments, so that a tag in a passage, in the prompt or in a
correction never counts; `compute_score_em` does the same for a plain string. The reward of a trajectory:

    | answer                 | format valid                               | format invalid       |
    |------------------------|--------------------------------------------|----------------------|
    | right                  | score                                      | score - format_score |
    | wrong                  | format_score (+ retrieval_score on a hit)  | final_format_score   |
    | none                   | cannot be                                  | 0                    |

Answers are compared after SQuAD's normalisation (Rajpurkar et al. 2016, the official evaluation script),
extended to Unicode. Everything here is linear in the length of the text.
"""

from __future__ import annotations

import json
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

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
_PASSAGE_HEAD = re.compile(r"\ndoc \d+\(title: ")
_LABEL_KEYS = ("ground_truth", "target", "golden_answers", "answers", "answer")

Segment = tuple[str, str]
"""A source (`model`, `observation` or `correction`) and its text."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A trajectory's reward, and why."""

    reward: float
    answer: str | None
    """The last answer the model gave, or None."""
    exact_match: bool
    f1: float
    """Token F1 against the nearest gold answer, 0 to 1."""
    valid_format: bool
    invalid_reason: str | None
    retrieval_hit: bool
    """Whether a gold answer stands in a passage, whatever the format."""


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

    `golden_answers` takes a label as `parse_golden_answers` does. With `metric="f1"` an answer that is not exactly
    right earns its token F1 in place of 0 where that is more. `keep_numbers`: see `normalize_answer`.
    `end_of_turn`: further texts of end-of-turn tokens, which do not break the format at the very end.
    """
    segments = _merge(segments)
    golden = _normalised(parse_golden_answers(golden_answers), keep_numbers)
    answer = _last_answer(segments)
    predicted = normalize_answer(answer or "", keep_numbers)
    exact_match = predicted in golden
    f1 = 1.0 if exact_match else max((_f1(predicted, gold) for gold in golden), default=0.0)
    reason = _format_error(segments, end_of_turn)
    hit = _is_hit((text for source, text in segments if source == "observation"), golden, keep_numbers)

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

    Only what follows the last assistant marker is scored; `<information>` right after a closed search
    counts as an observation. Takes the options of `score_response`.
    """
    return score_response(split_segments(solution_str), ground_truth, **options).reward


# --- Tags ---


class Action(NamedTuple):
    """A closed `<search>` or `<answer>` outside of `<think>`."""

    name: str
    content: str
    """The text between the tags, trimmed."""
    well_formed: bool
    """Not blank, and without another protocol tag inside."""


def iter_actions(text: str) -> Iterator[Action]:
    """The closed actions outside of `<think>`, in order; nothing after a think that stays open."""
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
    """For each tag the index of the next closing tag of its name; None without one."""
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
    """The segments without empty ones, neighbours of one source joined."""
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
    """Why the segments are not (think, search, observation)* think, answer; None if they are."""
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


def is_valid_sequence(text: str) -> tuple[bool, str]:
    """Whether a plain string's response is well-formed, and the reason if not."""
    reason = _format_error(_merge(split_segments(text)))
    return reason is None, reason or "valid"


def extract_solution(solution_str: str) -> str | None:
    """The last answer in a plain string's response, or None."""
    return _last_answer(_merge(split_segments(solution_str)))


# --- Answers ---


def normalize_answer(text: str, keep_numbers: bool = False) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no English articles, single spaces.

    Equal to SQuAD's on ASCII. Beyond it: compatibility forms (NFKC), case folding, Unicode's punctuation
    and mathematical, currency and modifier symbols count as punctuation, and format characters vanish.
    `keep_numbers` keeps a sign before a number and a point inside it, so that "3.5" is not "35", nor "-5" "5".
    """
    return _join(_without_punctuation(_fold(text, keep_numbers)))


def em_check(prediction: str, golden_answers: Any, keep_numbers: bool = False) -> bool:
    """Whether the prediction equals a gold answer once both are normalised; nothing equals a blank."""
    golden = _normalised(parse_golden_answers(golden_answers), keep_numbers)
    return normalize_answer(prediction, keep_numbers) in golden


def token_f1(prediction: str, golden_answers: Any) -> float:
    """SQuAD's token F1 against the nearest gold answer, 0 to 1."""
    predicted = normalize_answer(prediction)
    return max((_f1(predicted, gold) for gold in _normalised(parse_golden_answers(golden_answers), False)), default=0.0)


def is_retrieval_correct(text: str, golden_answers: Any) -> bool:
    """Whether a gold answer stands, as whole words, in a passage of a plain string's response."""
    golden = _normalised(parse_golden_answers(golden_answers), False)
    return _is_hit((part for source, part in split_segments(text) if source == "observation"), golden, False)


def parse_golden_answers(label: Any) -> list[str]:
    """The accepted answers in a label as it comes from parquet or JSON.

    Takes a string, a number, a list or numpy array of them, a dictionary such as `{"ground_truth":
    {"target": [...]}}`, or any of these as a JSON string; None and NaN are no answers. Raises ValueError
    on a dictionary without answers.
    """
    return list(dict.fromkeys(_iter_golden(label)))


def _iter_golden(label: Any) -> Iterator[str]:
    if hasattr(label, "tolist"):  # a numpy array or scalar
        label = label.tolist()
    if label is None or (isinstance(label, float) and math.isnan(label)):
        return
    if isinstance(label, str):
        decoded = _decoded_json(label)
        yield from [label] if decoded is None else _iter_golden(decoded)
    elif isinstance(label, dict):
        key = next((key for key in _LABEL_KEYS if key in label), None)
        if key is None:
            raise ValueError(
                f"a label that is a dictionary needs one of {_LABEL_KEYS}, found {sorted(map(str, label))}"
            )
        yield from _iter_golden(label[key])
    elif isinstance(label, list | tuple | set | frozenset):
        for item in label:
            yield from _iter_golden(item)
    elif isinstance(label, bytes):
        yield label.decode("utf-8", "replace")
    elif isinstance(label, float) and label.is_integer():
        yield str(int(label))
    else:
        yield str(label)


def _decoded_json(text: str) -> Any:
    """The list or labelled dictionary a string spells, or None: most strings are answers themselves."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        decoded = json.loads(text)
    except ValueError:
        return None
    return decoded if isinstance(decoded, list) or any(key in decoded for key in _LABEL_KEYS) else None


def _normalised(answers: Iterable[str], keep_numbers: bool) -> list[str]:
    return _normalised_cached(tuple(answers), keep_numbers)


@lru_cache(maxsize=4096)
def _normalised_cached(answers: tuple[str, ...], keep_numbers: bool) -> list[str]:
    """The answers normalised, without those of which nothing is left; cached, as a group shares its label."""
    return list(dict.fromkeys(filter(None, (normalize_answer(answer, keep_numbers) for answer in answers))))


def _f1(predicted: str, gold: str) -> float:
    common = sum((Counter(predicted.split()) & Counter(gold.split())).values())
    return 2 * common / (len(predicted.split()) + len(gold.split())) if common else 0.0


# --- Text ---

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_SIGN = re.compile(r"(?<![\w.])-(?=\.?\d)")
_POINT = re.compile(r"(?<![^\W\d])(?<!\.)\.(?=\d)")
_KEPT_SIGN, _KEPT_POINT = "\ue000", "\ue001"
"""Private characters that stand for a kept sign or point while punctuation goes."""
_POSSESSIVE = re.compile(r"'s\b")
_SCRIPTS_WITHOUT_SPACES = re.compile(
    # Thai, Lao, Tibetan; Burmese; Khmer; Han radicals to kana; Han; Hangul (its particles follow without a space)
    r"[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u30ff\u3400-\u9fff\uac00-\ud7af"
    r"\uf900-\ufaff\U00020000-\U0003ffff]"
)


def _marks() -> dict[str, str]:
    """Every mark of the basic plane beyond ASCII, and what stands for it: nothing, or punctuation of ASCII.

    Punctuation and mathematical and currency symbols are marks; so are format characters and the symbols that
    NFKC would turn into letters or blanks, which vanish.
    """
    plain = {"\u2019": "'", "\u2212": "-", "\u2013": "-"}
    kinds = {"Cf": "", "Sk": "", "So": ""} | dict.fromkeys(("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc"), ",")
    marks = {c: kinds.get(unicodedata.category(c)) for c in map(chr, range(128, 0x10000))}
    return {
        c: plain.get(c, mark)
        for c, mark in marks.items()
        if mark is not None and (unicodedata.category(c) != "So" or c in "©®™℠")
    }


_MARKS = _marks()
_ANY_MARK = re.compile(f"[{re.escape(''.join(_MARKS))}]")
_PUNCTUATION = string.punctuation.encode()
_TO_SPACES = bytes.maketrans(_PUNCTUATION, b" " * len(_PUNCTUATION))


def _fold(text: str, keep_numbers: bool) -> str:
    """The text without differences of case and of compatibility forms, and without punctuation beyond ASCII.

    With `keep_numbers` signs and points of numbers are marked.
    """
    if text.isascii():
        folded = text.lower()
    else:
        folded = unicodedata.normalize("NFKC", _ANY_MARK.sub(lambda mark: _MARKS[mark[0]], text))
        folded = folded.replace("\u2044", "/").casefold()  # a fraction's slash, from NFKC
    if keep_numbers:
        folded = _POINT.sub(_KEPT_POINT, _SIGN.sub(_KEPT_SIGN, folded))
    return folded


def _without_punctuation(folded: str) -> str:
    # Many times faster than str.translate: UTF-8 has no byte of ASCII inside another character.
    data = folded.encode("utf-8", "surrogatepass").translate(None, _PUNCTUATION)
    return data.decode("utf-8", "surrogatepass")


def _spaced(folded: str) -> str:
    """With spaces for punctuation, except for apostrophes within words."""
    data = _POSSESSIVE.sub(" ", folded).encode("utf-8", "surrogatepass").translate(_TO_SPACES, b"'")
    return data.decode("utf-8", "surrogatepass")


def _join(text: str) -> str:
    words = " ".join(_ARTICLES.sub(" ", text).split())
    return words if words.isascii() else words.replace(_KEPT_SIGN, "-").replace(_KEPT_POINT, ".")


def _is_hit(observations: Iterable[str], golden: Sequence[str], keep_numbers: bool) -> bool:
    return any(_observation_hits(_fold(text, keep_numbers), golden) for text in observations) if golden else False


def _observation_hits(folded: str, golden: Sequence[str]) -> bool:
    candidates = [
        (gold, pattern) for gold, pattern in zip(golden, map(_spelled, golden), strict=True) if pattern.search(folded)
    ]
    if not candidates:
        return False
    passages = _PASSAGE_HEAD.split(folded.replace("<information>", "\n").replace("</information>", "\n"))
    return any(
        _passage_hits(passage, gold) for passage in passages for gold, pattern in candidates if pattern.search(passage)
    )


@lru_cache(maxsize=4096)
def _spelled(gold: str) -> re.Pattern[str]:
    """A gold answer's longest word as it may be spelled, punctuation in between: without a match there is no hit."""
    word = max(gold.split(), key=len)
    return re.compile(
        r"(?:[^\w\s]|_)*".join(re.escape(character) for character in word if character not in "-.") or "-"
    )


def _passage_hits(passage: str, gold: str) -> bool:
    """Whether a gold answer stands in a folded passage, with its punctuation deleted or read as spaces."""
    return _stands_in(gold, _join(_without_punctuation(passage))) or _stands_in(gold, _join(_spaced(passage)))


def _stands_in(gold: str, text: str) -> bool:
    """Whether the gold answer occurs in the text between word boundaries."""
    start = text.find(gold)
    while start >= 0:
        if _is_boundary(text, start) and _is_boundary(text, start + len(gold)):
            return True
        start = text.find(gold, start + 1)
    return False


def _is_boundary(text: str, index: int) -> bool:
    """Whether no word goes on across the index; scripts without spaces may be cut anywhere."""
    return index in (0, len(text)) or not (_goes_on(text[index - 1]) and _goes_on(text[index]))


def _goes_on(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character in "-."
    if _SCRIPTS_WITHOUT_SPACES.match(character):
        return False
    return character.isalnum() or unicodedata.category(character)[0] == "M"
