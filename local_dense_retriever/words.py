"""Splits texts into the words that BM25 compares, for any script.

Words are runs of letters and digits, without stop words, reduced to their stems; the language decides on stop words
and stems. Chinese, Japanese, Thai, Lao, Khmer and Burmese put no spaces between words, and Korean attaches particles to
them: there, every two neighbouring characters count as a word, so that no dictionary is needed. A text may mix both.
For passages, single characters of such scripts count, too, so that a query of one character finds them.
"""

from __future__ import annotations

import itertools
import logging
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

import bm25s

logger = logging.getLogger(__name__)

DEFAULT_LANGUAGE = "english"

NO_LANGUAGE = "none"

STOP_WORDS = [
    *("chinese", "danish", "dutch", "english", "french", "german", "italian"),
    *("korean", "norwegian", "portuguese", "russian", "spanish", "swedish", "turkish"),
]
"""Languages whose stop words bm25s knows."""

_UNSPACED = (
    "\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"  # Han, kana
    "\uac00-\ud7a3"  # Hangul
    "\u0e01-\u0e5b\u0e81-\u0edf\u1000-\u109f\u1780-\u17dd"  # Thai, Lao, Burmese, Khmer
)


def _marks() -> str:
    """Signs that belong to the letter before them (accents, vowels of Indic scripts) and that `\\w` does not match.

    Only those of the basic plane: with others, `re` would search a list for every character.
    """
    return "".join(char for char in map(chr, range(0x300, 0x10000)) if unicodedata.category(char)[0] == "M")


_MARKS = _marks()
_RUN = re.compile(f"[{_UNSPACED}][{_UNSPACED}{_MARKS}]*")
_CHARACTER = re.compile(f"[{_UNSPACED}][{_MARKS}]*")
_WORD = rf"[\w{_MARKS}]{{2,}}|[{_UNSPACED}]"


def languages() -> list[str]:
    """The names that `--language` accepts: those of PyStemmer's stemmers and of bm25s's stop words, and `none`."""
    try:
        import Stemmer

        stemmed = set(Stemmer.algorithms()) - {"porter", "dutch_porter"}  # older rules for English and Dutch
    except ImportError:
        stemmed = set()
    return [*sorted(stemmed.union(STOP_WORDS)), NO_LANGUAGE]


def check_language(name: str) -> None:
    """Raise ValueError, which lists the choices, unless `name` is one of `languages()`."""
    if name not in (choices := languages()):
        raise ValueError(f"--language: found {name!r}, expected one of: {', '.join(choices)}")


def language_fault(language: str | None, retriever_name: str) -> str | None:
    """What is wrong with --language for this --retriever_name; None if nothing is."""
    if language is None:
        return None
    if retriever_name != "bm25" and retriever_name.partition(":")[0] != "hybrid":
        return f"--language: found {language!r}, expected none with --retriever_name {retriever_name}: it is bm25's"
    try:
        check_language(language)
    except ValueError as error:
        return str(error)
    return None


def stemmer_of(language: str) -> Any | None:
    """PyStemmer's stemmer for a language; None if it has none, or is not installed."""
    try:
        import Stemmer
    except ImportError:
        if language != NO_LANGUAGE:
            logger.warning("PyStemmer is not installed: BM25 compares whole words, not their stems")
        return None
    return Stemmer.Stemmer(language) if language in Stemmer.algorithms() else None


class Words:
    """Splits passages and queries into words in the same way."""

    def __init__(self, language: str = DEFAULT_LANGUAGE) -> None:
        check_language(language)
        self.language = language
        self._stemmer = stemmer_of(language)
        self._stop_words = language if language in STOP_WORDS else None

    @property
    def stemmed(self) -> bool:
        return self._stemmer is not None

    def of_passages(self, texts: Iterable[str], *, show_progress: bool = False) -> Any:
        """The texts as bm25s's `Tokenized`: for each text the numbers of its words, and the vocabulary."""
        return self._tokenize((spaced(text, single=True) for text in texts), True, show_progress)

    def of_queries(self, texts: Iterable[str]) -> list[list[str]]:
        return list(self._tokenize((spaced(text, single=False) for text in texts), False, False))

    def _tokenize(self, texts: Any, return_ids: bool, show_progress: bool) -> Any:
        return bm25s.tokenize(  # any iterable will do
            texts,
            token_pattern=_WORD,
            stopwords=self._stop_words,
            stemmer=self._stemmer,
            return_ids=return_ids,
            show_progress=show_progress,
        )


def spaced(text: str, *, single: bool) -> str:
    """The text with spaces around its words; with `single` also each character of scripts without spaces is a word.

    Equivalent forms of a character become one (NFKC: wide and narrow letters, composed and decomposed accents).
    """
    if text.isascii():
        return text
    return _RUN.sub(lambda run: f" {' '.join(_pairs(run[0], single))} ", unicodedata.normalize("NFKC", text))


def _pairs(run: str, single: bool) -> list[str]:
    """The pairs of neighbours in a run of characters; a character and its marks count as one."""
    characters = _CHARACTER.findall(run)
    pairs = [first + second for first, second in itertools.pairwise(characters)]
    return pairs + characters if single or not pairs else pairs
