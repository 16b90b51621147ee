"""How a setting names rows of data: `path`, `path@[a:b]`, or `owner/repo/file` of a Hugging Face data set.

The one place that knows this notation. It imports nothing heavy: the check of the arguments uses it as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>(-?\d+)?):(?P<stop>(-?\d+)?)\]", re.DOTALL)
_HUB_FILE = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)/(?P<file>[^@]+)")


@dataclass(frozen=True, slots=True)
class DataPath:
    """A file and the rows wanted of it: `DataPath.parse("train.parquet@[0:100]")`."""

    path: str
    rows: slice

    @classmethod
    def parse(cls, text: str) -> DataPath:
        """Either bound of `@[a:b]` may be missing or negative, as in Python.

        ValueError if there is an `@[` that is no such slice.
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
        """`owner/repo` and the file in it, if this may be a file of the hub.

        A path whose first folder is here is a local one, with a typo in what follows.
        """
        match = _HUB_FILE.fullmatch(self.path)
        if match is None or Path(self.path.split("/")[0]).exists():
            return None
        return match["repo"], match["file"]
