"""Types for the benchmarks' options: a number that cannot be measured with is refused in one line, before any work."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole_number(least: int = 1, multiple: int = 1) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least` that is a multiple of `multiple`."""
    wanted = f"a whole number of {least} or more" + (f", a multiple of {multiple}" if multiple > 1 else "")

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or number % multiple:
            raise argparse.ArgumentTypeError(f"expected {wanted}, found {text!r}")
        return number

    return parse


def positive(most: float = math.inf) -> Callable[[str], float]:
    """An argparse type: a finite number above 0, at most `most`."""
    wanted = "a number above 0" + (f", at most {most:g}" if most < math.inf else "")

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (0 < number <= most and math.isfinite(number)):
            raise argparse.ArgumentTypeError(f"expected {wanted}, found {text!r}")
        return number

    return parse
