"""The GPUs of one process: what Ray grants, made the only ones that the process sees. Knows nothing of Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(gpu_ids: Sequence[str]) -> dict[str, str]:
    """The environment of a process that sees exactly these GPUs, as 0, 1, ... in this order.

    Numbers are those of nvidia-smi, as Ray's are; CUDA's own count from the fastest on.
    """
    return {VISIBLE: ",".join(gpu_ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def see_only(gpu_ids: Sequence[str]) -> None:
    """Let this process see no other GPUs; to be called before anything starts CUDA in it."""
    os.environ.update(visible_devices(gpu_ids))


def cuda_runtime_folder() -> str | None:
    """The folder of CUDA's runtime library that torch was installed with; None if there is none, as on CPUs."""
    for folder in sys.path:
        found = sorted(Path(folder or ".").glob("nvidia/*/lib/libcudart.so.*"))
        if found:
            return str(found[-1].parent)
    return None


def check_granted(gpu_ids: Sequence[str]) -> None:
    """See only these GPUs from here on; ValueError if torch then finds less of them, as a build for CPUs does."""
    if not gpu_ids:
        return
    see_only(gpu_ids)
    import torch

    found = torch.cuda.device_count() if torch.version.cuda else 0
    if found == len(gpu_ids):
        return
    names = f"GPU{'s' if len(gpu_ids) > 1 else ''} {', '.join(gpu_ids)}"
    if torch.version.cuda is None:
        remedy = "run scripts/setup_gpu.sh and use .venv-gpu/bin/python"
    else:
        remedy = (
            f"it was built for CUDA {torch.version.cuda}: compare nvidia-smi's driver and devices, and what "
            f"{VISIBLE} was when Ray started"
        )
    raise ValueError(f"Ray grants {names}, torch {torch.__version__} sees {found or 'none'}: {remedy}")


def as_numbers(gpu_ids: Sequence[str]) -> list[str] | None:
    """The same GPUs by their numbers on this machine; None if nvidia-smi does not know one of them.

    A UUID may be shortened, as CUDA allows.
    """
    if all(gpu.isdecimal() for gpu in gpu_ids):
        return list(gpu_ids)
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    known = [line.split(", ") for line in listing.splitlines()]
    found = [[number for number, uuid in known if uuid.startswith(gpu)] for gpu in gpu_ids]
    return [one for (one,) in found] if all(len(matches) == 1 for matches in found) else None
