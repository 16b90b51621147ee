"""One SGLang server as a child process: starts, watches and stops it by its pid alone. Knows nothing of Ray.

    with EngineServer(EngineConfig(model_path="model", dtype="float32")) as server:
        requests.post(server.url + "/generate", json=...)

The server leads a process group of its own. `stop` ends that group. If the process that owns this object dies, for
whatever reason, the server ends its group itself (`sleuth.engine.launch`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import requests

from sleuth.dtypes import dtype_name
from sleuth.engine.devices import as_numbers, cuda_runtime_folder, visible_devices
from sleuth.engine.key import VARIABLE, engine_key, engine_session
from sleuth.engine.process_group import group_members, kill_group, shared_memory_files
from sleuth.interfaces import gloo_interface
from sleuth.leftovers import record
from sleuth.loopback import without_proxy

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
"""Where a server listens that nobody on another machine asks."""
CPU_STUBS = Path(__file__).parent / "cpu_stubs"
PACKAGE_ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.2
PORT_ATTEMPTS = 3
SERVER_PORTS = range(20_000, 32_000)
GPU_GRACE_SECONDS = 20.0
KILL_SECONDS = 10.0
DYING_SECONDS = 5.0
LOG_TAIL_LINES = 25
MAX_TEMPORARY_FOLDER = 50  # bytes: a Unix socket's path has at most 107, and the server's lie up to 56 below
NAME_PATH = "model_info"
"""What a server answers without asking its scheduler, so that it can be asked while its memory is lent."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**28), "MALLOC_TRIM_THRESHOLD_": str(2**28)}
"""Has glibc keep up to 256 MB of freed memory: weights arrive in buckets, each of which would need new pages."""
PORT_TAKEN = ("address already in use", "EADDRINUSE")


RESERVED_TOKENS = 6
"""SGLang refuses an input that comes closer than this to its context length. A trajectory may use all of it."""


class EngineStartError(RuntimeError):
    """The server ended, or was not healthy in time; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to start one server.

    On a machine without CUDA the server runs on the CPU and ignores `gpu_ids`, `mem_fraction_static`,
    `enable_memory_saver` and `releases_graphs`. Its tensor parallelism is then one rank on each of its nodes.
    """

    model_path: str | Path
    host: str = HOST
    """The address of this machine at which the server listens, and by which others reach it."""
    seed: int = 1234
    dtype: str = "auto"
    """float32, bfloat16, or auto (`sleuth.dtypes`)."""
    log_path: str | Path | None = None
    """The file for the server's log; None: one in the folder for temporary files."""
    context_length: int | None = None
    """The longest sequence, in tokens; None: what the model's configuration says."""
    max_total_tokens: int | None = None
    """Tokens the KV cache holds; None: 65,536 on a CPU, on GPUs what `mem_fraction_static` leaves room for."""
    max_running_requests: int = 256
    """The most requests that are decoded together; others wait in the server's queue."""
    cpu_threads: int = 1
    """OMP_NUM_THREADS. With a tiny model more threads are many times slower."""
    tensor_parallel_size: int = 1
    """Ranks on all nodes of the engine together."""
    nodes: int = 1
    """Nodes over which the engine's ranks are spread in equal parts, each with a server; that of node 0 is asked."""
    node_rank: int = 0
    """Which of these nodes this server is."""
    meeting: str = ""
    """host:port on node 0, where the servers of all nodes meet."""
    gpu_ids: tuple[str, ...] = ()
    """The GPUs of its node that it uses: numbers, UUIDs or one MIG id, as in CUDA_VISIBLE_DEVICES; none: all."""
    mem_fraction_static: float | None = None
    """The share of a GPU's memory for weights and KV cache."""
    enable_memory_saver: bool = False
    """Allows `release_memory` to give the GPU's memory to a trainer on the same device."""
    releases_graphs: bool = False
    """Whether that includes the tag cuda_graph: graphs are then captured in memory that can be released."""
    start_timeout: float = 600.0
    """Seconds within which the server must answer."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of sglang.launch_server; they outrank those chosen here."""


class EngineServer:
    """One server; see the module. After it was stopped or died it can be started again, and then gets a new port."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.log_path = Path(config.log_path) if config.log_path else _temporary_log()
        self._process: subprocess.Popen[bytes] | None = None
        self._url: str | None = None
        self._folder = Path()
        self._shared_memory: set[Path] = set()
        self._on_gpu = False

    @property
    def url(self) -> str:
        """The URL of the server, without a slash at the end; RuntimeError before it was started."""
        if self._url is None:
            raise RuntimeError("the engine was not started: call start() first")
        return self._url

    @property
    def pid(self) -> int | None:
        """The pid of the process that leads the server's group; None while nothing runs."""
        return self._process.pid if self._process else None

    def start(self) -> str:
        """Start the server, wait until it is healthy, and return its URL.

        Raises EngineStartError, with the end of the log, if the server ends, is stopped, or is not healthy within
        `config.start_timeout` seconds; none of its processes runs then.
        """
        if self.is_alive():
            raise RuntimeError(f"the engine at {self.url} already runs")
        self.stop()
        if self.log_path.exists() and self.log_path.stat().st_size:
            self.log_path.replace(self.log_path.with_name(f"{self.log_path.name}.old"))  # it may say why that one ended
        started = time.monotonic()
        for attempt in range(1, PORT_ATTEMPTS + 1):
            try:
                self._launch()
                self._wait_until_healthy(started + self.config.start_timeout)
            except BaseException as error:
                self.stop()
                # Between our choice of a free port and the server's use of it, another process can take it.
                if isinstance(error, EngineStartError) and attempt < PORT_ATTEMPTS and self._port_was_taken():
                    logger.warning("port of %s was taken meanwhile; trying another", self._url)
                    continue
                raise
            break
        logger.info("engine at %s is up after %.1f s, log %s", self.url, time.monotonic() - started, self.log_path)
        return self.url

    def is_alive(self) -> bool:
        """Whether the process runs (it may still be starting)."""
        process = self._process
        return process is not None and process.poll() is None

    def is_healthy(self, timeout: float = 5.0) -> bool:
        """Whether the server generates a token within `timeout` seconds; it dies of that while its memory is lent."""
        return self.is_alive() and self._answers("health", timeout)

    def trouble(self) -> str | None:
        """What is wrong with a started server: how it ended, or that it does not answer. None if nothing is wrong.

        It costs the engine nothing, and can be asked at any time: the server is asked for its name, not for a token,
        and its other processes are looked at from outside.
        """
        if self.is_alive() and (stopped := self._stopped()):
            pids = " ".join(str(process.pid) for process in stopped)
            return f"the engine at {self.url} is stopped (SIGSTOP; `kill -CONT {pids}` lets it go on)"
        # On a node other than the first, SGLang answers only this, and without a look at anything.
        if self.is_alive() and self._answers("health" if self.config.node_rank else NAME_PATH):
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(DYING_SECONDS)  # it stops answering before it is gone
        if self.is_alive():
            return f"the engine at {self.url} does not answer; its log: {self.log_path}"
        code = self._process.returncode if self._process else 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the engine at {self.url} {how}; its log: {self.log_path}"

    def _stopped(self) -> list[psutil.Process]:
        """The server's processes that were stopped by a signal."""
        found = []
        for process in group_members(self._process.pid) if self._process else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    found.append(process)
        return found

    def _answers(self, path: str = NAME_PATH, timeout: float = 5.0) -> bool:
        try:
            with engine_session() as session:
                return session.get(f"{self.url}/{path}", timeout=timeout).status_code == 200
        except requests.RequestException:
            return False

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 64 * 1024))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return "(there is no log)"
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, grace: float | None = None) -> None:
        """End the server and all processes that it started, if any. A `start` under way in another thread ends, too.

        `grace`: seconds that the server gets to end by itself before it is killed. None: 20 s on GPUs, because a
        killed server can leave their memory occupied; 0 s on a CPU, where that cannot happen.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        grace = (GPU_GRACE_SECONDS if self._on_gpu else 0.0) if grace is None else grace
        if grace > 0 and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        # The group's number stays reserved while any member lives, so this cannot hit a foreign process.
        members = group_members(process.pid)
        kill_group(process.pid, self._folder, self._shared_memory)
        self._shared_memory = set()
        process.wait()
        psutil.wait_procs(members, timeout=KILL_SECONDS)

    def release_memory(self, tags: tuple[str, ...] | None = None, timeout: float = 120.0) -> None:
        """Release the GPU's memory: `tags` out of weights, kv_cache and cuda_graph; None: all of them.

        Of cuda_graph SGLang releases nothing unless it started with `releases_graphs`. Call it only while the engine
        is idle: an engine with requests under way dies.
        """
        self._post("release_memory_occupation", {"tags": tags}, timeout)

    def resume_memory(self, tags: tuple[str, ...] | None = None, timeout: float = 120.0) -> None:
        """Take back memory that `release_memory` released, and no other: SGLang's scheduler would die of a KeyError.

        The weights in it are undefined until the next sync.
        """
        self._post("resume_memory_occupation", {"tags": tags}, timeout)

    def __enter__(self) -> EngineServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self) -> None:
        port = free_port(self.config.host)
        self._url = f"http://{self.config.host}:{port}"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._on_gpu = has_cuda()
        self._folder = Path(tempfile.mkdtemp(prefix="sleuth-engine-", dir=_socket_folder()))
        launch = [sys.executable, "-m", "sleuth.engine.launch", str(os.getpid()), str(self._folder)]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*launch, *server_args(self.config, port, self._on_gpu)],
                env=server_environment(self.config, self._folder, self._on_gpu),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        record(self._folder, pids=[self._process.pid])

    def _wait_until_healthy(self, deadline: float) -> None:
        process = self._process
        while not self.is_healthy():
            if process is None or self._process is not process:
                raise EngineStartError(f"the engine for {self.config.model_path} was stopped before it was ready")
            if process.poll() is not None:
                raise self._start_error(f"ended with exit code {process.returncode} before it was ready")
            if self._port_was_taken():  # the server's front end is gone then, but its other processes wait on
                raise self._start_error("found its port taken")
            if time.monotonic() > deadline:
                raise self._start_error(f"was not healthy after {self.config.start_timeout:.0f} s")
            time.sleep(POLL_SECONDS)
        assert process is not None
        self._shared_memory = shared_memory_files(process.pid)  # a server that dies by itself leaves it
        record(*self._shared_memory, pids=[process.pid])

    def _start_error(self, what: str) -> EngineStartError:
        return EngineStartError(
            f"the engine for {self.config.model_path} {what}; the end of its log {self.log_path}:\n{self.log_tail()}"
        )

    def _port_was_taken(self) -> bool:
        tail = self.log_tail().lower()
        return any(words.lower() in tail for words in PORT_TAKEN)

    def _post(self, path: str, body: dict[str, Any], timeout: float) -> None:
        with engine_session() as session:
            response = session.post(f"{self.url}/{path}", json=body, timeout=timeout)
        if response.status_code != 200:
            raise RuntimeError(f"{self.url}/{path} answered {response.status_code}: {response.text[:500]}")


def has_cuda() -> bool:
    """Whether the engine runs on GPUs; asked without starting CUDA in this process."""
    import torch

    return torch.version.cuda is not None and torch.cuda.device_count() > 0


def server_args(config: EngineConfig, port: int, on_gpu: bool) -> list[str]:
    """The arguments of sglang.launch_server for one engine."""
    args: dict[str, Any] = {
        "--model-path": config.model_path,
        "--host": config.host,
        "--port": port,
        "--dtype": dtype_name(config.dtype, on_gpu=on_gpu),
        "--random-seed": config.seed,
        "--max-running-requests": config.max_running_requests,
        "--context-length": config.context_length and config.context_length + RESERVED_TOKENS,
        "--max-total-tokens": config.max_total_tokens,
        "--log-level-http": "warning",  # else the log holds a line per request
    }
    if config.nodes > 1:
        args |= {"--nnodes": config.nodes, "--node-rank": config.node_rank, "--dist-init-addr": config.meeting}
    flags: list[str] = []
    if on_gpu:
        args |= {
            "--tp-size": config.tensor_parallel_size,
            "--mem-fraction-static": config.mem_fraction_static,
        }
        flags += ["--enable-memory-saver"] if config.enable_memory_saver else []
        if len(config.gpu_ids) > 1 and as_numbers(config.gpu_ids) is None:
            flags += ["--disable-custom-all-reduce"]  # it reads CUDA_VISIBLE_DEVICES, and takes only numbers there
    else:
        args |= {
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--tp-size": config.nodes if config.nodes > 1 else None,
            # Without this bound the server takes half of the machine's memory.
            "--max-total-tokens": config.max_total_tokens or 65_536,
        }
        flags += ["--sleep-on-idle"]  # else an idle engine keeps a core busy that the trainer needs
    named = [str(item) for name, value in args.items() if value is not None for item in (name, value)]
    return [*named, *flags, *config.extra_args]


def server_environment(config: EngineConfig, folder: Path, on_gpu: bool) -> dict[str, str]:
    """The environment of the server: ours, with `folder` for its sockets, and on CPUs the stand-ins for packages."""
    paths = [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ, OMP_NUM_THREADS=str(config.cpu_threads), TMPDIR=str(folder))
    environment[VARIABLE] = engine_key()
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # the model's own length, and RESERVED_TOKENS
    environment |= without_proxy(environment, config.host)  # it asks itself whether it is up
    environment |= gloo_interface(config.host, environment)
    if on_gpu:
        environment["NCCL_CUMEM_ENABLE"] = "0"  # memory that NCCL maps itself cannot be released
        if config.gpu_ids:
            environment |= visible_devices(as_numbers(config.gpu_ids) or config.gpu_ids)
        environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = str(int(config.enable_memory_saver and config.releases_graphs))
        if config.enable_memory_saver and "expandable_segments" in environment.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            del environment["PYTORCH_CUDA_ALLOC_CONF"]  # the trainer may want them; the memory saver cannot work so
        if config.enable_memory_saver and (runtime := cuda_runtime_folder()):
            # SGLang preloads the memory saver, which needs CUDA's runtime before torch can say where it is: where none
            # is installed system-wide, its processes would end at once, with 127.
            known = environment.get("LD_LIBRARY_PATH", "")
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in (known, runtime) if path)
    else:
        paths.insert(0, str(CPU_STUBS))
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        if config.nodes > 1:
            # A list of cores for each rank: without one SGLang wants as many NUMA nodes as there are ranks.
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * config.nodes)
            environment["TORCHDYNAMO_DISABLE"] = "1"  # a sharded embedding would be compiled, which needs triton
        environment |= KEEP_MEMORY
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def free_port(host: str = HOST) -> int:
    """A port that is free now at this machine's address `host`.

    It lies below the range from which clients get ports, so it is likely to stay free.
    """
    while True:
        port = random.SystemRandom().choice(SERVER_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port


def _socket_folder() -> str:
    """The parent of the server's temporary folder: not TMPDIR if that is so long that paths of sockets do not fit."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= MAX_TEMPORARY_FOLDER else "/tmp"


def _temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="sleuth-engine-", suffix=".log")
    os.close(handle)
    return Path(name)
