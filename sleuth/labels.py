"""Reads labels, in any shape in which data sets keep the accepted answers of a question. Nothing else knows the shapes.

`parse_golden_answers` gives the answers as texts, `is_blank` finds rows that no answer can win, and `as_text` writes a
label for people. What an answer is worth is the reward's business.
"""

from __future__ import annotations

import ast
import datetime
import io
import json
import tokenize
from collections.abc import Collection
from functools import lru_cache
from numbers import Number
from typing import Any

_LABEL_KEYS = (
    ("ground_truth",),
    ("target",),
    ("golden_answers",),
    ("answers",),
    ("answer", "value", "answer_aliases", "aliases", "normalized_value", "normalized_aliases"),  # MuSiQue, TriviaQA
    ("possible_answers",),  # PopQA
    ("text",),  # SQuAD, beside answer_start
)
"""The keys of a dictionary that hold answers: those of the first row that has any, taken together."""
_KNOWN_KEYS = tuple(key for keys in _LABEL_KEYS for key in keys)
_WRAPPERS = ("array", "str_", "bool_", "int32", "int64", "float32", "float64")
"""What numpy writes around a value: `array(['Paris'], dtype=object)`, `np.str_('Paris')`."""
_LISTS = (list, tuple, set, frozenset)
_VALUES = (Number, datetime.date, datetime.time)


def parse_golden_answers(label: Any) -> list[str]:
    """The accepted answers in a label of any common data set, each once; none in null, NaN, blanks and empty lists.

    A label is a text, a number, a list or numpy array of labels, or a dictionary with one of the keys of
    Search-R1, `{"ground_truth": {"target": [...]}}`, SQuAD, `{"text": [...], "answer_start": [...]}`, TriviaQA,
    `{"value": ..., "aliases": [...]}`, and the like; keys whose value holds no answer are skipped. A list of
    (key, value) pairs (an Arrow map) counts as such a dictionary. A text that is a list or such a dictionary in JSON
    or Python notation is parsed; every other text is an answer. ValueError for other dictionaries and other types.
    """
    try:
        return list(dict.fromkeys(_answers_in(label)))
    except RecursionError:
        raise ValueError("a label may nest lists and dictionaries, but this one does so too deeply to read") from None


def is_blank(label: Any) -> bool:
    """Whether a label is null, NaN or empty, or holds no answer in the places where data sets keep them.

    A label that `parse_golden_answers` cannot read is not blank: only its reward hook knows what it means.
    """
    try:
        return not parse_golden_answers(label)
    except ValueError:
        return label == {}


def as_text(label: Any) -> str:
    """The accepted answers, such as `Paris | City of Light`; for a label without any, the label itself."""
    try:
        return " | ".join(parse_golden_answers(label)) or str(label)
    except ValueError:
        return str(label)


def _answers_in(label: Any) -> list[str]:
    if isinstance(label, str):
        spelled = _label_spelled_by(label)
        return _answers_in(spelled) if spelled is not None else [label] if label.strip() else []
    if isinstance(label, _LISTS):
        if dictionary := _dictionary_of_pairs(label):
            return _answers_in_dictionary(dictionary)
        return [answer for item in label for answer in _answers_in(item)]
    if isinstance(label, dict):
        return _answers_in_dictionary(label)
    if hasattr(label, "tolist") and not hasattr(value := label.tolist(), "tolist"):  # a numpy array or scalar
        return _answers_in(value)
    if isinstance(label, bytes):
        return _answers_in(label.decode("utf-8", "replace"))
    if _is_missing(label):
        return []
    if isinstance(label, _VALUES):
        return [str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)]
    raise ValueError(
        f"expected a label that is a text, a number, a list of them or a dictionary with one of the keys "
        f"{', '.join(_KNOWN_KEYS)}; found {type(label).__name__}: {str(label)[:80]!r}"
    )


def _is_missing(label: Any) -> bool:
    """Whether the label is None, NaN, or pandas' NaT or NA."""
    if isinstance(label, Number | datetime.date):
        return bool(label != label)
    return label is None or type(label).__name__ == "NAType"


def _answers_in_dictionary(label: dict[Any, Any]) -> list[str]:
    """The answers under the first of the known keys that have any."""
    for keys in _LABEL_KEYS:
        if answers := [answer for key in keys if key in label for answer in _answers_in(label[key])]:
            return answers
    if not any(key in label for key in _KNOWN_KEYS):
        found = ", ".join(repr(key)[:40] for key in list(label)[:10]) or "none"
        raise ValueError(
            f"a label that is a dictionary needs one of the keys {', '.join(_KNOWN_KEYS)}, found {found}; "
            "rename the key of the answers, or name another column with --label-key"
        )
    return []


def _dictionary_of_pairs(items: Collection[Any]) -> dict[str, Any] | None:
    """The dictionary that a collection of (key, value) pairs stands for, or None if it is not one.

    Lists of two texts, which is how JSON writes pairs, are answers unless one of them begins with a known key.
    """
    pairs: list[Any] = [
        item for item in items if isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[0], str)
    ]
    if not pairs or len(pairs) < len(items):
        return None
    texts = all(isinstance(pair, list) and isinstance(pair[1], str) for pair in pairs)
    return None if texts and not any(key in _KNOWN_KEYS for key, _ in pairs) else dict(pairs)


@lru_cache(maxsize=4096)
def _label_spelled_by(text: str) -> Any:
    """The list or dictionary with answers that a text stands for, or None: most texts are answers themselves."""
    text = text.strip()
    if not text.startswith(("[", "{", "(", '"', "array(")):
        return None
    for read in (json.loads,) if text.startswith('"') else (json.loads, _read_python):
        try:
            value = read(text)
        except (ValueError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError):
            continue
        if isinstance(value, str):  # JSON within JSON; a quoted text alone is an answer
            return _label_spelled_by(value)
        if isinstance(value, dict):
            return value if any(key in value for key in _KNOWN_KEYS) else None
        if isinstance(value, tuple):  # of texts; (1, 2) and {1, 2} are rather answers themselves
            return list(value) if value and all(isinstance(item, str) for item in value) else None
        return value if isinstance(value, list) else None
    return None


def _read_python(text: str) -> Any:
    """The value of "['Paris', None]" or "{'target': array(['a' 'b'], dtype=object)}"; ValueError for other code."""
    words: list[str] = []
    before = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and before == tokenize.STRING:
            words.append(",")  # numpy prints texts without commas, and Python would join them
        if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT):
            words.append(token.string)
            before = token.type
    return _python_value(ast.parse(" ".join(words).strip(), mode="eval").body)


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bytes() | int() | float() | None as value):
            return value
        case ast.Name(id="nan") | ast.Name(id="NaN"):
            return None
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items):
            return [_python_value(item) for item in items]
        case ast.Tuple(elts=items) | ast.Set(elts=items):
            return tuple(_python_value(item) for item in items)
        case ast.Dict(keys=keys, values=values):
            names = [key.value for key in keys if isinstance(key, ast.Constant)]
            return dict(zip(names, map(_python_value, values), strict=True))  # ValueError where a key is no constant
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[value, *_]) if name in _WRAPPERS:
            return _python_value(value)
    raise ValueError(f"expected a value, found {type(node).__name__}")
