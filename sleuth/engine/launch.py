"""The process of one engine: `python -m sleuth.engine.launch OWNER_PID FOLDER <arguments of sglang.launch_server>`.

It runs SGLang's own server, unpatched, and watches its owner: when the process OWNER_PID dies, for whatever reason,
this process kills its whole process group and removes FOLDER, the engine's folder for temporary files.
`sleuth.engine.server` starts it as the leader of a new process group.

The watch asks who the parent is instead of asking the kernel for a signal (PR_SET_PDEATHSIG): that signal is sent when
the *thread* that started the process ends, which in a thread pool is long before the owner does.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sleuth.engine.key import VARIABLE
from sleuth.engine.process_group import kill_group

POLL_SECONDS = 0.5


def missing_engine() -> str | None:
    """What to do if SGLang is not installed; None if it is."""
    if importlib.util.find_spec("sglang") is not None:
        return None
    return (
        "the engine: expected the package sglang, found none; on a CPU run `bash scripts/setup_cpu.sh`, for GPUs "
        "`bash scripts/setup_gpu.sh`"
    )


def missing_router() -> str | None:
    """What to do if SGLang's router is not installed; None if it is."""
    if importlib.util.find_spec("sglang_router") is not None:
        return None
    return "--router: expected the package sglang-router, found none; `pip install --no-deps sglang-router==0.3.2`"


def watch_owner(owner_pid: int, folder: Path) -> None:
    """Kill the process group of the caller as soon as `owner_pid` is no longer its parent."""
    while os.getppid() == owner_pid:
        time.sleep(POLL_SECONDS)
    kill_group(os.getpgrp(), folder)


def leave_out_of_logs(key: str) -> None:
    """From now on log lines of this process, such as SGLang's list of all its settings, show *** instead of `key`."""
    make = logging.getLogRecordFactory()

    def make_without(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg, record.args = record.getMessage().replace(key, "***"), None
        return record

    logging.setLogRecordFactory(make_without)


def answer_no_browser() -> None:
    """Take out of SGLang's server what tells browsers that the pages of any site may read its answers (CORS)."""
    from sglang.srt.entrypoints.http_server import app

    app.user_middleware = [layer for layer in app.user_middleware if layer.cls.__name__ != "CORSMiddleware"]


def main(argv: list[str]) -> None:
    owner_pid, folder, server_argv = int(argv[0]), Path(argv[1]), argv[2:]
    assert os.getpgrp() == os.getpid(), "must lead a process group of its own: it kills the group"
    threading.Thread(target=watch_owner, args=(owner_pid, folder), daemon=True).start()
    if fault := missing_engine():
        sys.exit(fault)

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    key = os.environ.pop(VARIABLE)
    leave_out_of_logs(key)
    answer_no_browser()
    try:
        # One word each: a key may begin with "-".
        run_server(prepare_server_args([*server_argv, f"--api-key={key}", f"--admin-api-key={key}"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
