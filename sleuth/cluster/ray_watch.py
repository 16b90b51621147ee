"""Ends a run whose Ray has lost its control store (gcs_server): Ray itself takes a minute, and says nothing of the run.

Without the store no actor can be asked for anything, and none can be stopped in good order. So a thread says why, kills
what the run has started, and ends the process: the main thread may wait for an answer that will never come.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from sleuth.cluster.logs import failure_message

POLL_SECONDS = 1.0


class RayDiedError(RuntimeError):
    """Ray's control store ended before the run."""


@contextmanager
def control_store_watched(run_dir: Path, save: Path | None) -> Iterator[None]:
    """Watch the control store in the block, where it is this process's own; that of a joined cluster is not.

    `save`: the folder of checkpoints, from which the run can go on.
    """
    over = threading.Event()
    if (store := _own_control_store()) is not None:
        threading.Thread(target=_watch, args=(store, over, run_dir, save), name="control store", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _own_control_store() -> subprocess.Popen[bytes] | None:
    node: Any = ray._private.worker._global_node
    found = node.all_processes.get("gcs_server")
    return found[0].process if found else None


def _watch(store: subprocess.Popen[bytes], over: threading.Event, run_dir: Path, save: Path | None) -> None:
    while not over.wait(POLL_SECONDS):
        if store.poll() is not None:
            error = RayDiedError(
                f"expected Ray's control store (gcs_server, process {store.pid}) to live until the end, found it dead: "
                "killed, or out of memory; start again"
            )
            sys.stderr.write(f"{failure_message(error, run_dir, save)}\n")
            sys.stderr.flush()
            _kill_descendants()
            os._exit(1)


def _kill_descendants() -> None:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
