"""Starts the servers that a tool needs, without Ray: engines, and a retrieval server. They end with the tool."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from sleuth.arguments import Args
from sleuth.engine.devices import VISIBLE
from sleuth.engine.server import EngineServer, EngineStartError, has_cuda

ROOT = Path(__file__).resolve().parent.parent
TRACKERS = dict.fromkeys(("use_tensorboard", "use_wandb", "use_swanlab", "use_trackio"), False)
OF_THE_TRAINER = {"save": None, "ref_load": None, "colocate": False, **TRACKERS}
"""Settings whose files a tool without a trainer does not need, or that would have an engine wait for a trainer."""
RETRIEVER_SECONDS = 1800.0
"""How long a retrieval server may take to load: a large index is read from disk."""
POLL_SECONDS = 0.2
LOG_LINES = 15
_PR_SET_PDEATHSIG = 1  # prctl.h
_libc = ctypes.CDLL(None)


@contextmanager
def running_engines(args: Args) -> Iterator[list[EngineServer]]:
    """The engines of `args`, which serve --hf-checkpoint, for the time of the block; on GPUs each has its own.

    Raises EngineStartError, with the end of the log, if one does not start; ValueError if there are too few GPUs.
    """
    from sleuth.cluster.engines import engine_config  # imports Ray

    count, size = args.num_engines, args.rollout_num_gpus_per_engine
    gpus = visible_gpus(count * size) if has_cuda() else []
    what = "an engine" if count == 1 else f"{count} engines"
    sys.stderr.write(f"starting {what} (half a minute or more)\n")
    servers = [
        EngineServer(
            replace(
                engine_config(args, args.run_dir, index, devices=()),
                log_path=None,
                gpu_ids=tuple(gpus[index * size : (index + 1) * size]),
            )
        )
        for index in range(count)
    ]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        if count == 1:
            servers[0].start()
        else:
            with ThreadPoolExecutor(count) as threads:
                list(threads.map(EngineServer.start, servers))
        yield servers


def visible_gpus(count: int) -> list[str]:
    """The first `count` GPUs that this process may use; ValueError if there are less."""
    import torch

    named = [gpu.strip() for gpu in os.environ.get(VISIBLE, "").split(",") if gpu.strip()]
    found = named or [str(number) for number in range(torch.cuda.device_count())]
    if len(found) < count:
        raise ValueError(
            f"expected {count} GPUs for the engines (--rollout-num-gpus), found {len(found)}; lower it, or correct "
            f"{VISIBLE}"
        )
    return found[:count]


def engine_troubles(servers: Sequence[EngineServer]) -> list[str]:
    """What is wrong with engines that were started, such as how one ended."""
    return [trouble for server in servers if (trouble := server.trouble())]


@contextmanager
def retrieval_server(corpus: Path, retriever: str = "bm25", index: Path | None = None) -> Iterator[str]:
    """A retrieval server over `corpus` on a free port of this machine; gives its URL, such as http://.../retrieve.

    Raises ValueError, with the end of its log, if it does not start. It must be called in the main thread: the server
    ends with it, however it ends.
    """
    sys.stderr.write(f"starting a retrieval server ({retriever} over {corpus})\n")
    with tempfile.TemporaryDirectory(prefix="sleuth-retriever-") as folder:
        url_file, log = Path(folder) / "url", Path(folder) / "log"
        command = [sys.executable, str(ROOT / "local_dense_retriever/retrieval_server.py"), "--port", "0"]
        command += ["--corpus_path", str(corpus), "--retriever_name", retriever, "--url_file", str(url_file)]
        command += [] if index is None else ["--index_path", str(index)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # ctrl-C is for the tool, which then ends it
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        try:
            _wait_for(url_file, process, log)
            yield url_file.read_text(encoding="utf-8").strip() + "/retrieve"
        finally:
            process.terminate()
            process.wait()


def _wait_for(url_file: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + RETRIEVER_SECONDS
    while not url_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = " | ".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise ValueError(f"the retrieval server did not start: {tail}")
        time.sleep(POLL_SECONDS)


def one_line(error: Exception) -> str:
    """Of errors with several lines, such as the end of a log, only the arguments' are told as one."""
    if isinstance(error, EngineStartError):
        return str(error)
    head, *problems = str(error).splitlines() or [type(error).__name__]
    return f"{head}: {'; '.join(map(str.strip, problems))}" if problems else head
