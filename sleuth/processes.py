"""Names a process so that another one can tell later whether it still runs.

A pid alone is not enough: it is given again after its process ended, another host has the same one, and so has another
container of the same host.
"""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ProcessName:
    """A process: its pid, when it started (clock ticks after the machine did), and where both count."""

    host: str
    place: str
    """The boot and the pid namespace: within them a pid and a start belong to one process."""
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """The name of a process that runs here; ValueError if none does."""
        started = _start_ticks(pid)
        if started is None:
            raise ValueError(f"expected a running process, found none with pid {pid}")
        return cls(socket.gethostname(), _place(), pid, started)

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """The name that `to_dict` gave; None for anything else."""
        try:
            name = cls(str(values["host"]), str(values["place"]), int(values["pid"]), int(values["started"]))
        except (KeyError, TypeError, ValueError):
            return None
        return name

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def is_stopped(self) -> bool:
        """Whether the process runs here and was stopped by a signal (SIGSTOP, or ctrl-Z in a terminal)."""
        return self.runs() is True and _state(self.pid) in ("T", "t")

    def runs(self) -> bool | None:
        """Whether the process still runs; None if that cannot be seen from here (another host, container or boot)."""
        if self.place != _place():
            return None
        return _start_ticks(self.pid) == self.started


@functools.cache
def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks; None if it does not run, or has ended and only waits to be noticed."""
    fields = _stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def _state(pid: int) -> str | None:
    return next(iter(_stat(pid)), None)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()  # a command's name, in brackets, may hold anything
