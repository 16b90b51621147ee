"""Check one GPU: the trainer against the CPU, its memory, speed, and what weight sync rests on, in under eight minutes.

    python tools/gpu_check.py                    needs torch, megatron-core and one GPU, and nothing else
    python tools/gpu_check.py --device cpu       the same code with a tiny model; what needs CUDA is skipped
    python tools/gpu_check.py --only attention   one check; several names, several checks

No network, no engine, no Ray, no model: weights are random. Each check is a process of its own with a time limit, so
that one that fails or hangs costs only itself. Prints a table, then one line of JSON. Exits with 1 if a check failed,
with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.gpu_checks.results import Result

ROOT = Path(__file__).resolve().parent.parent
CHECKS = {
    "exactness": ("exactness", 120.0),
    "lending": ("lending", 90.0),
    "ipc": ("ipc", 60.0),
    "attention": ("attention", 60.0),
    "0.5B": ("size", 90.0),
    "3B": ("size", 150.0),
}
"""The module of a check, and the seconds that it may take."""
SECONDS = 470.0
"""All of them together."""
GONE_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if options.child:
        run_check(options.child, options.device, options.out)
        return 0
    if fault := missing(options.device):
        print(fault, file=sys.stderr)
        return 2
    machine = describe(options.device)
    print("  ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    for name in options.only or CHECKS:
        begun = time.monotonic()
        limit = min(CHECKS[name][1], SECONDS - (begun - started))
        for result in isolated(name, options.device, limit):
            results.append(asdict(result) | {"seconds": round(time.monotonic() - begun, 1)})
            print_line(results[-1])
    counts = {status: sum(r["status"] == status for r in results) for status in ("ok", "failed", "skipped")}
    summary = {"name": "gpu_check", "machine": machine, "seconds": round(time.monotonic() - started, 1)} | counts
    print(", ".join(f"{count} {status}" for status, count in counts.items()) + f" in {summary['seconds']} s")
    print(json.dumps(summary | {"checks": results}))
    return 1 if counts["failed"] else 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="these checks alone [all]")
    parser.add_argument("--child", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def missing(device: str) -> str | None:
    """One sentence that says what is not there, and what to do; None: all is there."""
    for package in ("torch", "megatron-core"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{sys.executable} has no {package}: use .venv-gpu/bin/python (scripts/setup_gpu.sh makes it)"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no GPU, expected one: run this where nvidia-smi shows one, with a torch "
            "for CUDA (.venv-gpu/bin/python), or add --device cpu to try the same code on a CPU"
        )
    return None


def describe(device: str) -> dict[str, str]:
    import torch

    versions = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
    about = {"device": "CPU", **versions, "python": platform.python_version()}
    if device == "cuda":
        about["device"] = torch.cuda.get_device_name(0)
        about["memory"] = f"{torch.cuda.get_device_properties(0).total_memory / 1e9:.1f} GB"
        about |= {"cuda": str(torch.version.cuda), "driver": driver()}
    return about


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def isolated(name: str, device: str, limit: float) -> Iterator[Result]:
    """The results of a check that runs in a process of its own; what it had found stays if it then fails."""
    if limit <= 0:
        yield Result(name, "failed", f"no time left of {SECONDS:.0f} s")
        return
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "results.jsonl", Path(folder) / "log"
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--child",
            name,
            "--device",
            device,
            "--out",
            str(out),
        ]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, env=environment(device), cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )
            fault = wait(process, limit)
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
        yield from (Result(**json.loads(line)) for line in lines)
        if fault:
            tail = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            yield Result(name, "failed", f"{fault}: {tail[-1][:400] if tail else 'it wrote nothing'}")


def wait(process: subprocess.Popen[bytes], limit: float) -> str | None:
    """What went wrong; whatever the process has started ends with it."""
    try:
        code = process.wait(limit)
        fault = f"ended with exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        fault = f"took more than {limit:.0f} s"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GONE_SECONDS)
    return fault


def environment(device: str) -> dict[str, str]:
    added = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    added |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    return os.environ | added


def run_check(name: str, device: str, out: Path) -> None:
    warnings.simplefilter("ignore")
    module = importlib.import_module(f"tools.gpu_checks.{CHECKS[name][0]}")
    results = module.check(device, name)
    with out.open("w", encoding="utf-8") as file:
        for result in results:
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()


def print_line(result: dict[str, Any]) -> None:
    """A line of the table; without a library that draws tables, which may not be there."""
    print(f"{result['name']:26} {result['status']:8} {result['seconds']:6.1f} s  {result['found']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
