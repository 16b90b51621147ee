"""SGLang's router in front of all engines, as a child process: one URL that sends each request where its beginning is.

    with RouterProcess(urls) as router:
        requests.post(router.url + "/generate", json=...)

It knows `/generate` and no more of what a run asks of engines: pausing, weights, flushing and aborting go to them.
As `sleuth.engine.launch` does for an engine, this module's main watches its owner and ends with it:
`python -m sleuth.engine.router OWNER_PID FOLDER <arguments of sglang_router.launch_router>`. It has the engines' key
from its environment, and asks its own callers for it, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import requests

from sleuth.engine.key import VARIABLE, engine_key, engine_session
from sleuth.engine.launch import watch_owner
from sleuth.engine.process_group import kill_group
from sleuth.engine.server import HOST, NAME_PATH, PACKAGE_ROOT, free_port
from sleuth.loopback import without_proxy

START_SECONDS = 60.0
POLL_SECONDS = 0.2
PORT_ATTEMPTS = 3
SERVE = "serve"
LOG_TAIL_LINES = 15


class RouterError(RuntimeError):
    """The router ended, or was not ready in time; the message holds the end of its log."""


class RouterProcess:
    """The router of the engines at `engine_urls`. `timeout`: seconds for one request.

    `host`: the address of this machine at which it listens.
    """

    def __init__(self, engine_urls: Sequence[str], log_path: Path, timeout: float = 1800.0, host: str = HOST) -> None:
        self._timeout = math.ceil(timeout)
        self.engine_urls, self.log_path, self.host = list(engine_urls), log_path, host
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self.url = ""

    def start(self) -> str:
        """Start it, wait until it knows all engines, and return its URL. RouterError if that fails."""
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self._launch()
            try:
                self._wait_until_ready(time.monotonic() + START_SECONDS)
                return self.url
            except BaseException as error:
                taken = isinstance(error, RouterError) and "in use" in self._log_tail()
                self.stop()
                if not taken or attempt == PORT_ATTEMPTS:
                    raise
        raise AssertionError("not reached")

    def trouble(self) -> str | None:
        """What is wrong with it, for an error message; None if it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        return f"the router at {self.url} ended with exit code {self._process.returncode}; its log: {self.log_path}"

    def stop(self) -> None:
        """End the router and its watch, if they run."""
        if self._process is None:
            return
        process, self._process = self._process, None
        kill_group(process.pid, self._folder)
        process.wait()

    def __enter__(self) -> RouterProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self) -> None:
        port = free_port(self.host)
        self.url = f"http://{self.host}:{port}"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="sleuth-router-"))
        command = [sys.executable, "-m", "sleuth.engine.router", str(os.getpid()), str(self._folder)]
        hosts = [urlsplit(url).hostname or "" for url in (self.url, *self.engine_urls)]
        environment = dict(os.environ) | without_proxy(os.environ, *hosts)
        paths = [str(PACKAGE_ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment[VARIABLE] = engine_key()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *router_args(self.engine_urls, self.host, port, free_port(), self._timeout)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self, deadline: float) -> None:
        assert self._process is not None
        while not self._knows_all():
            if self._process.poll() is not None:
                raise self._start_error(f"ended with exit code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._start_error(f"did not know all {len(self.engine_urls)} engines after {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def _knows_all(self) -> bool:
        try:
            with engine_session() as session:
                workers = session.get(f"{self.url}/workers", timeout=5.0).json()["workers"]
        except (requests.RequestException, ValueError, KeyError):
            return False
        return {worker["url"] for worker in workers if worker["is_healthy"]} == set(self.engine_urls)

    def _start_error(self, what: str) -> RouterError:
        return RouterError(f"the router {what}; the end of its log {self.log_path}:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return "(there is no log)"


def router_args(engine_urls: Sequence[str], host: str, port: int, metrics_port: int, timeout: int) -> list[str]:
    """The arguments of sglang_router.launch_router; `metrics_port` is one of its own, which two runs cannot share.

    `timeout`: seconds for one request.
    """
    named = {
        "--policy": "cache_aware",
        "--host": host,
        "--port": port,
        "--prometheus-host": HOST,  # else every network of the machine can read its metrics
        "--prometheus-port": metrics_port,
        "--health-check-endpoint": f"/{NAME_PATH}",  # not /health, which generates a token
        "--request-timeout-secs": timeout,
        "--log-level": "warn",
    }
    return ["--worker-urls", *engine_urls, *(str(word) for item in named.items() for word in item)]


def main(argv: list[str]) -> int:
    """Run the router until it ends, or until the owner does: then the whole process group is killed."""
    if argv[0] == SERVE:
        return serve(argv[1:])
    owner_pid, folder, words = int(argv[0]), Path(argv[1]), argv[2:]
    assert os.getpgrp() == os.getpid(), "must lead a process group of its own: it kills the group"
    threading.Thread(target=watch_owner, args=(owner_pid, folder), daemon=True).start()
    # A process of its own: the router runs in Rust and lets no other thread of its interpreter work.
    return subprocess.call([sys.executable, "-m", "sleuth.engine.router", SERVE, *words])


def serve(words: list[str]) -> int:
    """Be the router."""
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args([*words, f"--api-key={os.environ.pop(VARIABLE)}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
