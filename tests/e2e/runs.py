"""Starting `train.py` as a user does, and finding what it left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
# A busy machine of two cores takes minutes to start everything.
START_SECONDS = 400.0
RUN_SECONDS = 600.0


@contextmanager
def started_training(
    flags: list[str], folder: Path = ROOT, environment: Mapping[str, str] = {}, before: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`train.py`, typed in `folder`, in a session of its own as from a terminal; killed if it still runs.

    It has the variables of `environment` besides this process's. `before` it on the command line may stand words that
    say where it runs. Its output is captured.
    """
    process = subprocess.Popen(
        [*before, sys.executable, str(ROOT / "train.py"), *flags],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment),
    )
    try:
        yield process
    finally:
        process.kill()  # Ray's processes and the engines notice and end
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run_training(
    flags: list[str], folder: Path = ROOT, environment: Mapping[str, str] = {}, before: Sequence[str] = ()
) -> tuple[int, str]:
    """Exit code and output of a finished run; one that does not finish in time fails the test."""
    with started_training(flags, folder, environment, before) as process:
        try:
            output, _ = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"the run was not over after {RUN_SECONDS:.0f} s: {output[-2000:]}")
        return process.returncode, output


@contextmanager
def retriever(folder: Path, before: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a BM25 server over the demo's corpus, which is told in `folder`; `before`: see `started_training`."""
    url_file = folder / "url"
    command = [sys.executable, "local_dense_retriever/retrieval_server.py", "--port", "0", "--url_file", str(url_file)]
    with subprocess.Popen([*before, *command, "--corpus_path", "data/demo/corpus.jsonl.gz"], cwd=ROOT) as server:
        try:
            wait_until(url_file.exists, "the retrieval server")
            yield url_file.read_text().strip() + "/retrieve"
        finally:
            server.terminate()


def search_config(url: str) -> str:
    """The file of --custom-config-path for short searches at `url`."""
    return f"search_r1: {{local: {{search_url: '{url}'}}, topk: 1, max_turns: 2, max_observation_tokens: 48}}\n"


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """What still runs for the run in `run_dir`: every actor and engine holds a log file there open."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(Path(file.path).is_relative_to(run_dir) for file in process.open_files()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} was not there within {seconds:.0f} s")
        time.sleep(0.1)
