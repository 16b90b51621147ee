"""Makes SIGINT and SIGTERM end a run in the same way: once, and with everything that it started."""

from __future__ import annotations

import signal


def end_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, even in a process that a shell started in the background."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    # Ignore further signals while the run stops its engines: an interrupted stop would leave some running. Not by
    # SIG_IGN: with it Python complains of a signal that has already arrived, as when a script passes on a ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    raise KeyboardInterrupt


def _ignore(*_: object) -> None:
    """A handler that does nothing."""
