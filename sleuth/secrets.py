"""Keeps passwords and keys out of what a run writes: files, logs, console, trackers, messages.

Three ways, from the most certain to the widest net:

* `masked(value)` is for settings: what stands under a key such as `auth`, and user and password of a URL, become ***.
* `without_passwords(text)` does the same with URLs in a text.
* `without_known(text)` takes out the secrets that `hide` was told of, wherever they turn up; `redact(text)` does both,
  for what libraries and hooks say: messages of errors, tracebacks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

MASK = "***"
REFUSED_WORDS = ("api_key", "apikey", "secret", "password", "token")
"""A text under a key of such a name, or that ends in `_` and such a name, is refused in configuration files."""
MASKED_WORDS = (
    *REFUSED_WORDS,
    *("key", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "secrets"),
    *("passwords", "passwd", "passphrase", "pwd"),
)
"""Under these names a value may be a secret or not: it is used, and masked wherever it would be shown."""
SHORTEST_NUMBER = 6
"""Digits of a number that may be a secret: others are sizes and limits, such as `max_token: 5`."""
SHORTEST = 6
"""Characters of a secret that is searched for in texts: a shorter one would be found where it is none."""
WORD = 16
"""Under a name that may mean something else (`sort_key: question`), so long, or with a digit, for the same reason."""

_SMALL_NUMBER = re.compile(rf"-?[\d.]{{1,{SHORTEST_NUMBER - 1}}}")
_USER = re.compile(r"""(?<=://)[^/\s"'<>?#]*@""")
_PARAMETER = re.compile(r"""([?&]([\w.-]+)=)([^&\s"'<>#]+)""")


def is_secret(key: Any) -> bool:
    """Whether the name of a key says that its value is a secret."""
    return _ends_in(str(key).lower(), REFUSED_WORDS)


def may_be_secret(key: Any) -> bool:
    """Whether the name of a key suggests that its value may be a secret."""
    return _ends_in(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key)).lower().replace("-", "_"), MASKED_WORDS)


def _ends_in(name: str, words: Iterable[str]) -> bool:
    return any(name == word or name.endswith(f"_{word}") for word in words)


def masked(value: Any, key: Any = "") -> Any:
    """`value`, which stands under `key`, with `***` for each secret; `env:NAME` only names one and stays."""
    return _masked(value, may_be_secret(key))


def _masked(value: Any, secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(inner, secret or may_be_secret(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(inner, secret) for inner in value]
    if secret and _can_be_secret(value):
        return MASK
    return without_passwords(value) if isinstance(value, str) else value


def _can_be_secret(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value) and not value.startswith("env:") and not _SMALL_NUMBER.fullmatch(value)
    return isinstance(value, int | float) and not isinstance(value, bool) and len(str(value)) >= SHORTEST_NUMBER


def without_passwords(text: str) -> str:
    """The text with `***` for user and password of each URL, and for parameters such as `?token=`."""
    text = _USER.sub(f"{MASK}@", text)
    return _PARAMETER.sub(lambda found: found[1] + (MASK if may_be_secret(found[2]) else found[3]), text)


def shown(value: Any, key: Any = "", limit: int = 80) -> str:
    """A value as messages quote it: masked first, then cut."""
    return redact(f"{masked(value, key)!r}")[:limit]


# --- Secrets that are known ---

_known: set[str] = set()


def hide(*values: Any) -> None:
    """From now on `redact` takes out the secrets in these settings, and those in the environment of this process."""
    paths_aside = {name: value for name, value in os.environ.items() if not value.startswith("/")}
    found = (secret for value in (paths_aside, *values) for secret in _secrets_in(value, certain=True, secret=False))
    _known.update(secret for secret in found if len(secret) >= SHORTEST)


def redact(text: str) -> str:
    """The text without the secrets that `hide` knows, and without passwords in URLs."""
    text = without_known(text)
    return without_passwords(text) if "://" in text else text


def without_known(text: str) -> str:
    """The text without the secrets that `hide` knows; URLs, which may be of pages, stay as they are."""
    for secret in sorted(_known, key=len, reverse=True):  # one may be a part of another
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def _secrets_in(value: Any, *, secret: bool, certain: bool) -> Iterator[str]:
    """`secret`: the name above may be that of a secret; `certain`: it says so."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            named = not secret and may_be_secret(key)
            yield from _secrets_in(inner, secret=secret or named, certain=is_secret(key) if named else certain)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets_in(inner, secret=secret, certain=certain)
    elif isinstance(value, str) and value.startswith("env:"):
        yield os.environ.get(value.removeprefix("env:"), "")
    elif isinstance(value, str) and "://" in value:
        yield from _in_url(value)
    elif secret and _can_be_secret(value) and (certain or len(str(value)) >= WORD or re.search(r"\d", str(value))):
        yield str(value)


def _in_url(url: str) -> Iterator[str]:
    """The password, or what stands in its place, and the parameters that are secrets; as written and decoded."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    found = [parts.password or parts.username or ""]
    found += [value for _, name, value in _PARAMETER.findall(url) if may_be_secret(name)]
    for text in found:
        yield from (text, unquote(text))
