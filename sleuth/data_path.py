"""How a setting names rows of data: `path`, `path@[a:b]`, or `owner/repo/file` of a Hugging Face data set.

Only this module knows the notation. It imports nothing heavy, because the checks of the arguments use it too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>(-?\d+)?):(?P<stop>(-?\d+)?)\]", re.DOTALL)
_HUB_FILE = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)/(?P<file>[^@]+)")


@dataclass(frozen=True, slots=True)
class DataPath:
    """A file, and which of its rows to read: `DataPath.parse("train.parquet@[0:100]")`."""

    path: str
    rows: slice

    @classmethod
    def parse(cls, text: str) -> DataPath:
        """Parse `path` or `path@[a:b]`; either bound may be missing or negative, as in Python.

        Raises ValueError if `@[` is followed by something else.
        """
        match = _SLICE.fullmatch(text)
        if match is None:
            if "@[" in text:
                raise ValueError(
                    f"expected a slice path@[a:b] with whole numbers a and b, found {text}; correct the brackets"
                )
            return cls(text, slice(None))
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        return cls(match["path"], slice(start, stop))

    @property
    def hub_file(self) -> tuple[str, str] | None:
        """(`owner/repo`, file in it) if this may be a file of the Hugging Face hub, else None.

        A path whose first folder exists on this machine is taken for a local path with a typo.
        """
        match = _HUB_FILE.fullmatch(self.path)
        if match is None or Path(self.path.split("/")[0]).exists():
            return None
        return match["repo"], match["file"]
