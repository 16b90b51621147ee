"""What stands in a web page: its bytes decoded, its main text, and of that what is around a search result's snippet, or
what matters to a question.

Pages come from strangers: some take a parser seconds. So this runs in `sleuth.pages.reader`'s processes; it imports
little, because they start with it.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections import Counter
from collections.abc import Sequence

CONTEXT_CHARS = 600
"""Around a snippet, at most this many characters on either side, within its paragraph."""
RELEVANT_CHARS = 20_000
PARAGRAPH_CHARS = 1000
_WORD = re.compile(r"\w+")


# --- Decoding ---

_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{2,40})""", re.IGNORECASE)
_BETWEEN_TEXTS = re.compile(rb"[<>\r\n]+")
_WIDER = {  # what pages mean by a label: its superset, as browsers read it
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "iso8859-9": "cp1254",
    "big5": "big5hkscs",
}
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def decode_page(data: bytes, header_charset: str | None = None, *, cut: bool = False) -> str:
    """The text of a page. Tried in this order: byte order mark, UTF-8, the declared charset, a detected one.

    `cut`: the page is longer than the data, which may therefore end inside a character.
    """
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return data[len(bom) :].decode(encoding, "replace")
    meta = _META_CHARSET.search(data, 0, 4096)
    declared = [_codec(label) for label in (header_charset, meta[1].decode("ascii") if meta else None) if label]
    utf8 = [] if b"\0" in data or "iso2022_jp" in declared else ["utf-8"]
    for encoding in filter(None, [*utf8, *declared]):
        try:
            return codecs.getincrementaldecoder(encoding)().decode(data, final=not cut)
        except UnicodeDecodeError:
            continue
    return data.decode(_detected(data), "replace")


def _codec(label: str) -> str | None:
    """Python's codec for a declared charset; None if it is unknown or does not decode text."""
    try:
        info = codecs.lookup(label)
    except (LookupError, ValueError):
        return None
    name = _WIDER.get(info.name, info.name)
    return name if info._is_text_encoding and not name.startswith(("idna", "punycode", "unicode", "raw")) else None


def _detected(data: bytes) -> str:
    """The charset that chardet detects, among those of the web, from those parts of the page that are not ASCII.

    The whole page would mislead it: much markup and English outweighs a few lines of another language.
    """
    import chardet

    texts = b" ".join(text for text in _BETWEEN_TEXTS.split(data) if not text.isascii())
    best = chardet.detect(texts, encoding_era=chardet.EncodingEra.MODERN_WEB, prefer_superset=True, compat_names=False)
    return best["encoding"] or "cp1252"


# --- Reading ---


def snippet_context(html: str, snippet: str) -> str | None:
    """The main text of a page around its snippet, or None if the snippet is not found in it."""
    text = main_text(html)
    squeezed, positions = _squeeze(text)
    spans = [span for span in (_find(squeezed, positions, part) for part in _fragments(snippet)) if span]
    return "\n".join(text[start:end] for start, end in _merged([_widen(text, *span) for span in spans])) or None


def main_text(html: str) -> str:
    """The main text of a page, each paragraph on a line; "" if it has none."""
    from trafilatura import extract

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # a page without text is no error here
    return extract(html, include_comments=False, include_tables=True, favor_recall=True, deduplicate=False) or ""


def relevant_text(html: str, question: str) -> str | None:
    """The main text of a page, the paragraphs first that share most words with the question; None if it has no text.

    A word counts the more, the fewer paragraphs hold it. The text has at most RELEVANT_CHARS characters; a paragraph
    that is longer than PARAGRAPH_CHARS is taken in parts.
    """
    parts = [part for line in main_text(html).splitlines() for part in _parts_of(line.strip())]
    words = [set(_WORD.findall(part.lower())) for part in parts]
    asked = set(_WORD.findall(question.lower()))
    holding = Counter(word for found in words for word in found & asked)
    scores = [sum(1 / holding[word] for word in found & asked) for found in words]
    best = sorted(range(len(parts)), key=lambda i: -scores[i])  # those of equal score stay in order
    return "\n".join(parts[i] for i in best)[:RELEVANT_CHARS] or None


def _parts_of(line: str) -> list[str]:
    """A paragraph, or its parts of at most PARAGRAPH_CHARS characters, cut at spaces where there are any."""
    parts = []
    while len(line) > PARAGRAPH_CHARS:
        at = line.rfind(" ", PARAGRAPH_CHARS // 2, PARAGRAPH_CHARS) + 1 or PARAGRAPH_CHARS
        parts.append(line[:at].rstrip())
        line = line[at:]
    return [*parts, line] if line else parts


def _fragments(snippet: str) -> list[str]:
    """The parts of a snippet between ellipses, without a date in front; short parts only if there are no others."""
    parts = [part.strip(" \t\n·—–-") for part in re.split(r"\.{3,}|…|(?<=\d{4}) [—·-] ", snippet)]
    longest = max((len(part) for part in parts), default=0)
    return [part for part in parts if len(part) >= min(longest, 15)]


def _find(squeezed: str, positions: Sequence[int], part: str) -> tuple[int, int] | None:
    """The span in the text where a part of a snippet occurs, ignoring whitespace and case."""
    wanted, _ = _squeeze(part)
    start = squeezed.find(wanted) if wanted else -1
    return None if start < 0 else (positions[start], positions[start + len(wanted) - 1] + 1)


def _squeeze(text: str) -> tuple[str, list[int]]:
    """The text in lower case without whitespace, and the position of each of its characters in the original."""
    positions = [index for index, character in enumerate(text) if not character.isspace()]
    return "".join(_lower(text[index]) for index in positions), positions


def _lower(character: str) -> str:
    lower = character.lower()
    return lower if len(lower) == 1 else character


def _widen(text: str, start: int, end: int) -> tuple[int, int]:
    """The span widened to whole paragraphs; on each side by at most CONTEXT_CHARS, then cut at a word."""
    low, high = max(0, start - CONTEXT_CHARS), min(len(text), end + CONTEXT_CHARS)
    line_start, line_end = text.rfind("\n", low, start) + 1, text.find("\n", end, high)
    if line_start == 0 and low > 0:
        line_start = text.find(" ", low, start) + 1 or low
    if line_end < 0:
        line_end = high if high == len(text) else max(text.rfind(" ", end, high), end)
    return line_start, line_end


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
