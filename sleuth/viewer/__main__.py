"""Shows runs in a browser: curves of several together, live; their trajectories, token by token.

    python -m sleuth.viewer runs/demo/20260101-120000 [more runs]       prints the address of the page

A folder that is no run but holds some shows all of them. The page is served on this machine's loopback address alone;
from elsewhere: ssh -L 8080:127.0.0.1:8080 machine, with --port 8080. Whoever is logged in to this machine can read it.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from aiohttp import web

from sleuth.viewer.runs import named_runs
from sleuth.viewer.server import make_app

HOST = "127.0.0.1"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sleuth.viewer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", help="folders of runs, or folders that hold such")
    parser.add_argument("--port", type=int, default=0, help="port of the page [a free one]")
    options = parser.parse_args(argv)
    try:
        folders = [run for folder in options.run_dirs for run in run_folders(folder)]
        listener = listen(options.port)
    except (ValueError, OSError, OverflowError) as error:
        parser.error(str(error))
    with listener:
        url = f"http://{HOST}:{listener.getsockname()[1]}/"
        sys.stdout.write(f"{len(folders)} run{'s' if len(folders) > 1 else ''} at {url} (ctrl-C ends it)\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            web.run_app(make_app(named_runs(folders)), sock=listener, print=None, access_log=None)
    return 0


def run_folders(folder: Path) -> list[Path]:
    """The folder itself if it is that of a run, else the runs below it; ValueError if there are none."""
    if is_run(folder):
        return [folder]
    found = sorted(_runs_below(folder))
    if not found:
        raise ValueError(
            f"expected the folder of a run (with metrics.jsonl, config.yaml or trajectories/), found none at {folder}"
        )
    return found


def is_run(folder: Path) -> bool:
    """Whether a run has this folder, one that has not logged a step among them."""
    return any((folder / name).exists() for name in ("metrics.jsonl", "trajectories")) or (
        (folder / "config.yaml").is_file() and (folder / "logs").is_dir()
    )


def _runs_below(folder: Path, depth: int = 3) -> Iterator[Path]:
    if depth and folder.is_dir():
        for child in folder.iterdir():
            if is_run(child):
                yield child
            else:
                yield from _runs_below(child, depth - 1)


def listen(port: int) -> socket.socket:
    """A listening socket on the loopback address; OSError, which names the port, if it is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise OSError(f"--port {port}: {error.strerror}; take another, or leave it out") from None
    return listener


if __name__ == "__main__":
    sys.exit(main())
