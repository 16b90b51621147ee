"""SIGINT and SIGTERM end a run in the same way: once, and with everything it started."""

from __future__ import annotations

import signal


def end_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, also where a shell has started us in the background."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    # What comes while the run stops its engines is not heard: half a stop would leave some running. Not SIG_IGN:
    # with it Python complains of a signal that has come already, as when a script passes on a ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    raise KeyboardInterrupt


def _ignore(*_: object) -> None:
    """Not heard."""
