"""What a machine needs, whatever is run on it: packages, GPUs and drivers, ports, disk, memory, limits."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import psutil

from sleuth.doctor.findings import Check, Finding, note, ok, wrong
from sleuth.engine.launch import missing_engine
from sleuth.engine.server import free_port

ROOT = Path(__file__).resolve().parents[2]
NEEDED_DRIVER = 580
"""Of NVIDIA, for CUDA 13; scripts/setup_gpu.sh needs the same."""
CORE = ("torch", "transformers", "megatron-core", "ray", "sglang", "numpy", "pydantic", "tokenizers", "safetensors")
"""A run cannot do without these."""
FREE_DISK, FREE_SHM = 5e9, 1e9
"""Bytes below which a note is made."""
OPEN_FILES, PROCESSES = 4096, 2048
SHORT_JOB = 3600.0
"""Seconds that are left to a batch job below which a note is made."""
SHOWN = 6
_PIN = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)


def machine_checks() -> list[tuple[str, Check]]:
    """The checks, by the name under which one that fails is told."""
    return [
        ("python", python),
        ("packages", packages),
        ("engine", engine),
        ("gpus", gpus),
        ("ports", ports),
        ("disk", disk),
        ("shared memory", shared_memory),
        ("memory", memory),
        ("limits", limits),
        ("time limit", time_limit),
    ]


def python() -> Iterator[Finding]:
    yield ok("python", f"{sys.version.split()[0]} at {sys.executable}")


def pins() -> tuple[str, dict[str, str]]:
    """The file that pins this environment's packages, and the versions in it; none outside of a checkout."""
    import torch

    name = f"locks/gpu-{sys.version_info.major}.{sys.version_info.minor}.txt"
    path = ROOT / "scripts" / ("constraints-cpu.txt" if torch.version.cuda is None else name)
    if not path.is_file():
        return str(path), {}
    texts = [path.read_text(encoding="utf-8")]
    beside = path.with_name("requirements-cpu-nodeps.txt")
    texts += [beside.read_text(encoding="utf-8")] if torch.version.cuda is None else []
    return f"scripts/{path.relative_to(ROOT / 'scripts')}", dict(_PIN.findall("\n".join(texts)))


def packages() -> Iterator[Finding]:
    """The installed versions against the pins."""
    file, pinned = pins()
    missing = [name for name in CORE if installed(name) is None]
    if missing:
        remedy = "run `bash scripts/setup_cpu.sh` or, for GPUs, `bash scripts/setup_gpu.sh`"
        yield wrong("packages", f"expected {', '.join(missing)}, found none; {remedy}")
    if not pinned:
        yield note("packages", f"expected the pinned versions in {file}, found no such file; nothing is compared")
        return
    other = [
        f"{name} {found} instead of {version}"
        for name, version in pinned.items()
        if (found := installed(name)) is not None and found != version
    ]
    if other:
        more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
        yield note(
            "packages",
            f"expected the versions of {file}, which are tested together, found {', '.join(other[:SHOWN])}{more}; run "
            "the set-up again",
        )
    else:
        yield ok("packages", f"all {sum(installed(name) is not None for name in pinned)} are as {file} pins them")


def installed(name: str) -> str | None:
    """The version of a package, without a build's name such as +cpu; None if it is not there."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def engine() -> Iterator[Finding]:
    if fault := missing_engine():
        yield wrong("engine", fault.removeprefix("the engine: "))
    else:
        yield ok("engine", f"SGLang {installed('sglang') or 'of an unknown version'}")


def gpus() -> Iterator[Finding]:
    """The driver, and whether torch sees what nvidia-smi does."""
    import torch

    listed = nvidia_smi()
    if not listed:
        yield ok("gpus", "nvidia-smi finds none: engine and trainer run on the CPU")
        return
    drivers = sorted({driver for _, driver in listed})
    names = f"{len(listed)} of {', '.join(sorted({name for name, _ in listed}))}, driver {', '.join(drivers)}"
    if min(int(driver.split(".")[0]) for driver in drivers) < NEEDED_DRIVER:
        yield wrong("gpus", f"expected an NVIDIA driver >= {NEEDED_DRIVER}, found {names}; update it and restart")
    elif torch.version.cuda is None:
        yield note("gpus", f"{names}, but torch {torch.__version__} is a build for CPUs; use .venv-gpu/bin/python")
    elif torch.cuda.device_count() == 0:
        yield wrong("gpus", f"{names}, but torch {torch.__version__} sees none; look at CUDA_VISIBLE_DEVICES")
    else:
        yield ok("gpus", f"{names}; torch sees {torch.cuda.device_count()}")


def nvidia_smi() -> list[tuple[str, str]]:
    """Name and driver version of each GPU; none where nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    pairs = [line.rpartition(",") for line in text.splitlines() if "," in line]
    return [(name.strip(), driver.strip()) for name, _, driver in pairs if driver.strip()[:1].isdigit()]


def ports() -> Iterator[Finding]:
    """Servers of a run listen on this machine's loopback."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
    yield ok("ports", f"servers can listen on 127.0.0.1, for example on {port}, and be reached there")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        name = socket.gethostname()
        yield note(
            "ports", f"the host's own name {name} has no address ({error}); add it to /etc/hosts: Ray asks for it"
        )


def disk() -> Iterator[Finding]:
    for name, folder in (("this folder", Path.cwd()), ("temporary files (TMPDIR)", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        if free < FREE_DISK:
            yield note(
                "disk", f"{name}: {_gb(free)} free in {folder}; a run writes logs, checkpoints and sockets there"
            )
        else:
            yield ok("disk", f"{name}: {_gb(free)} free in {folder}")


def shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Ray keeps batches there, and weights go to the engines through it."""
    if not folder.is_dir():
        yield wrong("shared memory", f"expected {folder}, found none; mount a tmpfs there")
        return
    usage = shutil.disk_usage(folder)
    if usage.free < FREE_SHM:
        yield note(
            "shared memory",
            f"{_gb(usage.free)} of {_gb(usage.total)} free in {folder}: Ray then uses the disk, and weights go to the "
            "engines slowly; start a container with --shm-size=8g or --ipc=host",
        )
    else:
        yield ok("shared memory", f"{_gb(usage.free)} of {_gb(usage.total)} free in {folder}")


def memory(cgroup: Path = Path("/sys/fs/cgroup")) -> Iterator[Finding]:
    available, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    limit = min((value for value in _cgroup_limits(cgroup)), default=total)
    bounded = f", of which this container may use {_gb(limit)}" if limit < total else ""
    text = f"{_gb(available)} of {_gb(total)} available{bounded}; {len(os.sched_getaffinity(0))} cores"
    yield ok("memory", text) if min(available, limit) >= 4e9 else note("memory", f"{text}; the demo needs 4 GB")


def _cgroup_limits(cgroup: Path) -> Iterator[int]:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = cgroup / name
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdecimal():
            yield int(text)


def limits() -> Iterator[Finding]:
    """Limits of this process (ulimit), which everything it starts inherits."""
    found = {
        "open files (ulimit -n)": (resource.RLIMIT_NOFILE, OPEN_FILES, "ulimit -n 65536"),
        "processes (ulimit -u)": (resource.RLIMIT_NPROC, PROCESSES, "ulimit -u 65536"),
        "seconds of CPU (ulimit -t)": (resource.RLIMIT_CPU, None, "ulimit -t unlimited"),
        "address space (ulimit -v)": (resource.RLIMIT_AS, None, "ulimit -v unlimited"),
        "size of a file (ulimit -f)": (resource.RLIMIT_FSIZE, None, "ulimit -f unlimited"),
    }
    low = []
    for name, (kind, least, remedy) in found.items():
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY and (least is None or soft < least):
            wanted = "no limit" if least is None else f"at least {least}"
            low.append(note("limits", f"{name}: expected {wanted}, found {soft}; `{remedy}` before the run"))
    yield from low or [ok("limits", "open files, processes, CPU time, memory and file size are not bounded tightly")]


def time_limit(environment: Mapping[str, str] = os.environ, now: float | None = None) -> Iterator[Finding]:
    """When a batch system will end this process."""
    left, source = seconds_left(environment, time.time() if now is None else now)
    if source is None:
        yield ok("time limit", "none: no Slurm or CI job")
    elif left is None:
        yield note("time limit", f"{source} does not say when it ends; save often (--save, --save-interval)")
    else:
        text = f"{source} ends in {left / 60:.0f} minutes"
        goes_on = "a run with --save is saved on SIGTERM, and goes on with --load"
        yield (note if left < SHORT_JOB else ok)("time limit", f"{text}; {goes_on}")


def seconds_left(environment: Mapping[str, str], now: float) -> tuple[float | None, str | None]:
    """Seconds until the job ends, if it says so, and what kind of job it is; (None, None) outside of one."""
    if job := environment.get("SLURM_JOB_ID"):
        end = environment.get("SLURM_JOB_END_TIME", "")
        return (float(end) - now if end.isdecimal() else None), f"the Slurm job {job}"
    if "GITLAB_CI" in environment:
        limit, start = environment.get("CI_JOB_TIMEOUT", ""), environment.get("CI_JOB_STARTED_AT_SECONDS", "")
        left = float(limit) - (now - float(start) if start.isdecimal() else 0) if limit.isdecimal() else None
        return left, "the GitLab job"
    if "GITHUB_ACTIONS" in environment:
        return None, "the GitHub job"
    return (None, "the CI job") if environment.get("CI") else (None, None)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
