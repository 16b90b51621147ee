"""SIGINT and SIGTERM end a run in the same way: once, and with everything it started."""

from __future__ import annotations

import signal


def end_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, also where a shell has started us in the background."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    # What comes while the run stops its engines is not heard: half a stop would leave some running.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
