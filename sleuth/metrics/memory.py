"""The memory that processes and GPUs hold, as metrics. Knows nothing of the flags, of Ray or of torch."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Iterable, Sequence

import psutil

logger = logging.getLogger(__name__)

GB = 1e9


def process_memory(name: str, processes: Iterable[psutil.Process] | None = None) -> dict[str, float]:
    """`perf/memory/<name>`: resident memory in GB of these processes together, of this one by default."""
    total = 0
    for process in [psutil.Process()] if processes is None else processes:
        with contextlib.suppress(psutil.Error):  # it has ended
            total += process.memory_info().rss
    return {f"perf/memory/{name}": total / GB}


def gpu_memory(name: str, gpu_ids: Sequence[str]) -> dict[str, float]:
    """`perf/gpu_memory/<name>`: memory in GB that all processes use on these GPUs together; {} if that is not known."""
    if not gpu_ids:
        return {}
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", ",".join(gpu_ids)]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return {f"perf/gpu_memory/{name}": sum(float(line) for line in listing.split()) * 2**20 / GB}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.debug("the memory of GPUs %s is not known: %s", ", ".join(gpu_ids), error)
        return {}
