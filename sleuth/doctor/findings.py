"""What the doctor finds: a line each, that something is well, might hurt, or is wrong, then with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """It may hurt a run."""
    WRONG = "wrong"
    """A run would end of it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report; `details` are printed below it as they are."""

    verdict: Verdict
    what: str
    text: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<5}  {self.what}: {self.text}"


def ok(what: str, text: str, details: str = "") -> Finding:
    return Finding(Verdict.OK, what, text, details)


def note(what: str, text: str) -> Finding:
    return Finding(Verdict.NOTE, what, text)


def wrong(what: str, text: str) -> Finding:
    return Finding(Verdict.WRONG, what, text)


Check = Callable[[], Iterable[Finding]]


def findings_of(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """The findings of named checks, one after the other; one that raises is told as wrong, and the others go on."""
    for what, check in checks:
        try:
            yield from check()
        except (ValueError, OSError) as error:
            yield wrong(what, " ".join(str(error).split()) or type(error).__name__)
        except Exception as error:  # a doctor that falls ill says so, and looks at the rest
            yield wrong(what, f"the check itself failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
