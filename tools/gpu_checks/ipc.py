"""Weights from one process to another: a flattened bucket whose memory both see, as in a colocated weight sync.

By the handles of `sleuth.weight_sync.handles`: on CUDA one of the sender's memory (IPC), which names the GPU by its
UUID, on a CPU the name of a file in shared memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.multiprocessing as mp

from sleuth.weight_sync.buckets import flatten
from sleuth.weight_sync.handles import decode, encode
from tools.gpu_checks.results import Result

GPU_ELEMENTS, CPU_ELEMENTS = 2**25, 2**18
BUCKETS = 3


def check(device: str, name: str) -> Iterator[Result]:
    mp.set_sharing_strategy("file_system")
    size = GPU_ELEMENTS if device == "cuda" else CPU_ELEMENTS
    command = [sys.executable, "-m", "tools.gpu_checks.ipc"]
    root = Path(__file__).resolve().parents[2]
    seconds, wrong = 0.0, 0
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdin
        assert receiver.stdout
        for number in range(BUCKETS):
            bucket = make_bucket(number, size, device)
            flat = flatten(bucket) if device == "cuda" else flatten(bucket).share_memory_()
            _synchronise(device)
            payload = {"flattened_tensor": flat, "metadata": [name for name, _ in bucket]}
            receiver.stdin.write(encode(payload) + "\n")
            receiver.stdin.flush()
            line = receiver.stdout.readline()
            if not line:
                raise RuntimeError("the receiving process ended; its error is above")
            answer = json.loads(line)
            wrong += answer["checksum"] != checksum(flat)
            seconds = answer["seconds"]
        receiver.stdin.close()
        receiver.wait()
    speed = 4 * size / seconds / 1e9
    found = f"{BUCKETS - wrong} of {BUCKETS} buckets of {4 * size / 1e6:.0f} MB arrived as sent; {speed:.1f} GB/s"
    yield Result(
        "memory between processes", "failed" if wrong else "ok", found, {"wrong": wrong, "gb_per_second": speed}
    )


def make_bucket(number: int, size: int, device: str) -> list[tuple[str, torch.Tensor]]:
    """Two tensors of `size` elements in all, other ones for each number."""
    generator = torch.Generator().manual_seed(number)
    whole = torch.randn(2 * size, generator=generator).to(device, torch.bfloat16)
    return [("a.weight", whole[:size].view(-1, 64)), ("b.weight", whole[size:])]


def checksum(flat: torch.Tensor) -> int:
    """Changes with the order of 8-byte words and with every one of them."""
    words = flat.view(torch.int64)
    return int((words * torch.arange(1, len(words) + 1, device=words.device)).sum())


def receive() -> None:
    """Answer every bucket on standard input with its checksum and the seconds that it took to copy."""
    for line in sys.stdin:
        flat = decode(line)["flattened_tensor"]
        own = torch.empty_like(flat)
        _synchronise(flat.device.type)
        start = time.perf_counter()
        own.copy_(flat)
        _synchronise(flat.device.type)
        seconds = time.perf_counter() - start
        print(json.dumps({"checksum": checksum(own), "seconds": seconds}), flush=True)


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    receive()
