"""Answers to questions: compare an answer with the accepted ones of a label, find them in passages.

Answers are compared after SQuAD's normalisation (Rajpurkar et al. 2016, the official evaluation script), extended to
Unicode. The reward (`qa_em_format.py`) decides what a right answer is worth. All functions take time linear in the
length of the texts.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sleuth.labels import parse_golden_answers

__all__ = ["GoldAnswers", "answer_key", "em_check", "normalize_answer", "parse_golden_answers"]

# --- Comparing ---


def normalize_answer(text: str, keep_numbers: bool = False) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no English articles, single spaces.

    On ASCII the result equals SQuAD's. Beyond ASCII, text is case-folded and brought to compatibility forms (NFKC);
    Unicode's punctuation and its mathematical, currency and modifier symbols count as punctuation; format characters
    are removed. `keep_numbers` keeps a sign before a number and a point inside one: "3.5" is then not "35", and "-5"
    not "5".
    """
    return _join(_without_punctuation(_fold(text, keep_numbers)))


def answer_key(text: str, keep_numbers: bool = False) -> str:
    """A key that two answers share if they are equal: the normalised text, or the text itself if that is empty.

    So "A", "The", "+" and "A+" are answers too, each equal only to itself. Case, spaces, compatibility forms and
    punctuation around the answer ("A.", "(A)") still make no difference. The key is empty only for a blank text.
    """
    return normalize_answer(text, keep_numbers) or _as_written(text)


def em_check(prediction: str, golden_answers: Any, keep_numbers: bool = False) -> bool:
    """Whether the prediction equals an accepted answer of the label; a blank prediction equals none."""
    return GoldAnswers.of(golden_answers, keep_numbers).compare(prediction)[0]


@dataclass(frozen=True, slots=True)
class GoldAnswers:
    """The accepted answers of a label, prepared for comparison."""

    keys: frozenset[str]
    """The `answer_key` of each answer."""
    normalised: tuple[str, ...]
    """The normalised answers, without empty ones; token F1 and passages are compared with these."""
    keep_numbers: bool = False

    @classmethod
    def of(cls, label: Any, keep_numbers: bool = False) -> GoldAnswers:
        """The accepted answers of a label, which `parse_golden_answers` reads (ValueError if it cannot)."""
        return _gold_answers(tuple(parse_golden_answers(label)), keep_numbers)

    def compare(self, prediction: str) -> tuple[bool, float]:
        """Whether the prediction equals an accepted answer, and its token F1 (SQuAD's, 0 to 1) against the nearest one.

        F1 is 1.0 for an equal answer, and 0.0 for an unequal one if either is empty after normalisation.
        """
        predicted = normalize_answer(prediction, self.keep_numbers)
        if (predicted or _as_written(prediction)) in self.keys:
            return True, 1.0
        return False, max((_f1(predicted, gold) for gold in self.normalised), default=0.0)

    def found_in(self, observations: Iterable[str]) -> bool:
        """Whether a passage of an observation contains an accepted answer as whole words.

        An answer that is empty after normalisation is never found: nearly every passage has an "a" or a "+".
        """
        golden = self.normalised
        return bool(golden) and any(_observation_hits(_fold(text, self.keep_numbers), golden) for text in observations)


@lru_cache(maxsize=4096)
def _gold_answers(answers: tuple[str, ...], keep_numbers: bool) -> GoldAnswers:
    """The prepared answers; cached, because all samples of a group have the same label."""
    normalised = dict.fromkeys(normalize_answer(answer, keep_numbers) for answer in answers)
    keys = frozenset(answer_key(answer, keep_numbers) for answer in answers)
    return GoldAnswers(keys - {""}, tuple(filter(None, normalised)), keep_numbers)


def _f1(predicted: str, gold: str) -> float:
    common = sum((Counter(predicted.split()) & Counter(gold.split())).values())
    return 2 * common / (len(predicted.split()) + len(gold.split())) if common else 0.0


# --- Passages ---


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
    """A pattern for the answer's longest word, punctuation allowed in between. No match means: not in the passage."""
    word = max(gold.split(), key=len)
    return re.compile(
        r"(?:[^\w\s]|_)*".join(re.escape(character) for character in word if character not in "-.") or "-"
    )


def _passage_hits(passage: str, gold: str) -> bool:
    """Whether a folded passage contains a gold answer, with the punctuation deleted or replaced by spaces."""
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
    """Whether the index is between words, not inside one; in scripts without spaces every index is."""
    return index in (0, len(text)) or not (_goes_on(text[index - 1]) and _goes_on(text[index]))


def _goes_on(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character in "-."
    if _SCRIPTS_WITHOUT_SPACES.match(character):
        return False
    return character.isalnum() or unicodedata.category(character)[0] == "M"


# --- Text ---

_PASSAGE_HEAD = re.compile(r"\ndoc \d+\(title: ")
_ARTICLES = frozenset(("a", "an", "the"))
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
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
_PLAIN = str.maketrans({"\u2019": "'", "\u2212": "-", "\u2013": "-"})
"""Typographic marks, and what a keyboard has for them."""


def _marks() -> dict[str, str]:
    """For every mark of the basic plane beyond ASCII its replacement: an ASCII punctuation mark, or nothing.

    Marks are punctuation and mathematical and currency symbols. Format characters, and symbols that NFKC would turn
    into letters or blanks, are marks that are removed.
    """
    kinds = {"Cf": "", "Sk": "", "So": ""} | dict.fromkeys(("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc"), ",")
    marks = {c: kinds.get(unicodedata.category(c)) for c in map(chr, range(128, 0x10000))}
    return {
        c: _PLAIN.get(ord(c), mark)
        for c, mark in marks.items()
        if mark is not None and (unicodedata.category(c) != "So" or c in "©®™℠")
    }


_MARKS = _marks()
_ANY_MARK = re.compile(f"[{re.escape(''.join(_MARKS))}]")
_PUNCTUATION = string.punctuation.encode()
_TO_SPACES = bytes.maketrans(_PUNCTUATION, b" " * len(_PUNCTUATION))


_AROUND = " .,:;!?()[]\"'\u2018\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a\u3001\u3002\u300c\u300d\u300e\u300f"
"""Punctuation that may stand around an answer: sentence marks, brackets and quotes, also the Chinese and Japanese."""


def _as_written(text: str) -> str:
    """The text case-folded, in compatibility forms (NFKC), with single spaces and without punctuation around it."""
    folded = unicodedata.normalize("NFKC", text.translate(_PLAIN)).casefold()
    words = " ".join("".join(c for c in folded if unicodedata.category(c) != "Cf").split())
    return words.strip(_AROUND) or words


def _fold(text: str, keep_numbers: bool) -> str:
    """The text case-folded, in compatibility forms (NFKC), and without punctuation beyond ASCII.

    With `keep_numbers`, the signs and points of numbers are replaced by markers that survive normalisation.
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
    """The text with a space for each punctuation mark, except for apostrophes inside words."""
    data = _POSSESSIVE.sub(" ", folded).encode("utf-8", "surrogatepass").translate(_TO_SPACES, b"'")
    return data.decode("utf-8", "surrogatepass")


def _join(text: str) -> str:
    """Words between single spaces, without articles, from a text without punctuation; restores marked numbers."""
    words = text.split()
    joined = " ".join(words)
    if joined.isascii() and joined.isprintable():  # words of letters and digits alone, the usual case
        return " ".join([word for word in words if word not in _ARTICLES])
    joined = " ".join(_ARTICLE.sub(" ", joined).split())
    return joined.replace(_KEPT_SIGN, "-").replace(_KEPT_POINT, ".")
