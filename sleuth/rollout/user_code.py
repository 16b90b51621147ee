"""Which lines of a stack are the user's own: neither of this package nor of a library."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

_OURS = f"{Path(__file__).resolve().parent.parent}{os.sep}"
_LIBRARIES = tuple({sys.prefix, sys.base_prefix})


def is_users(filename: str) -> bool:
    """Whether a file holds the user's own code."""
    return not filename.startswith(("<", _OURS)) and "site-packages" not in filename and not _is_standard(filename)


def user_frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    """The frames of the user's own code, outermost first; if the error has none, those of the error that caused it."""
    while error is not None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
        if frames:
            return frames
        error = error.__cause__ or error.__context__
    return []


def user_traceback(error: BaseException) -> str:
    """A traceback of the error that shows only lines of the user's own code."""
    return "".join([*traceback.format_list(user_frames(error)), *traceback.format_exception_only(error)])


def user_place(error: BaseException) -> str:
    """The innermost line of the user's own code, as in ` (my_hook.py:12)`; empty if there is none."""
    frames = user_frames(error)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _is_standard(filename: str) -> bool:
    return filename.startswith(tuple(f"{prefix}/lib" for prefix in _LIBRARIES))
