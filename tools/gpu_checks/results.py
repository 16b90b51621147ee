"""What a check reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """One line of the table: what was found beside what was expected, and the same as numbers."""

    name: str
    status: Status
    found: str
    figures: dict[str, float] = field(default_factory=dict)


def judged(name: str, measured: dict[str, tuple[float, float]], note: str = "") -> Result:
    """A result from `measured`: by quantity, what was found and the most that it may be. NaN fails."""
    wrong = any(not found <= most for found, most in measured.values())
    parts = [f"{what} {found:.1e} (at most {most:.1e})" for what, (found, most) in measured.items()]
    figures = {what: found for what, (found, _) in measured.items()}
    return Result(name, "failed" if wrong else "ok", "; ".join([*parts, note] if note else parts), figures)


def needs_cuda(name: str) -> Result:
    return Result(name, "skipped", "needs CUDA")
