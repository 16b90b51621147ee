"""How a setting names rows of data: `path`, `path@[a:b]`, or a Hugging Face data set, `owner/set[@revision][/file]`.

Only this module knows the notation. It imports nothing heavy, because the checks of the arguments use it too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
"""How the names of data files end."""
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>(-?\d+)?):(?P<stop>(-?\d+)?)\]", re.DOTALL)
_HUB_FILE = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>[^@]+))?")


class HubFile(NamedTuple):
    """A file of a data set on the Hugging Face hub; `file` and `revision` are None where they are left out."""

    repo: str
    file: str | None
    revision: str | None = None


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
    def hub_file(self) -> HubFile | None:
        """The file of the Hugging Face hub that this may be, else None.

        A path whose first folder exists on this machine is taken for a local path with a typo, and so is the name of
        a data file in a folder.
        """
        match = _HUB_FILE.fullmatch(self.path)
        if match is None or Path(self.path.split("/")[0]).exists():
            return None
        if match["file"] is None and match["repo"].endswith(SUFFIXES):
            return None
        return HubFile(match["repo"], match["file"], match["revision"])
