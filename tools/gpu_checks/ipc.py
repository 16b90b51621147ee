"""Weights from one process to another: a flattened bucket whose memory both see, as in a colocated weight sync.

On CUDA the receiver opens the sender's memory by an IPC handle; on a CPU it is a file of shared memory.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from sleuth.weight_sync.buckets import flatten
from tools.gpu_checks.results import Result

GPU_ELEMENTS, CPU_ELEMENTS = 2**25, 2**18
BUCKETS = 3


def check(device: str, name: str) -> Iterator[Result]:
    mp.set_sharing_strategy("file_system")  # by name: of a descriptor the receiver would have to be a child of ours
    size = GPU_ELEMENTS if device == "cuda" else CPU_ELEMENTS
    command = [sys.executable, "-m", "tools.gpu_checks.ipc"]
    root = Path(__file__).resolve().parents[2]
    seconds, wrong = 0.0, 0
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdin
        assert receiver.stdout
        buffer = torch.empty(4 * size, dtype=torch.uint8, device=device)
        if device == "cpu":
            buffer.share_memory_()
        for number in range(BUCKETS):
            bucket = make_bucket(number, size, device)
            flat = flatten(bucket, buffer)  # one buffer for all, which the receiver must see anew each time
            _synchronise(device)
            receiver.stdin.write(_pickled({"flat": flat, "names": [name for name, _ in bucket]}) + "\n")
            receiver.stdin.flush()
            line = receiver.stdout.readline()
            if not line:
                raise RuntimeError("the receiving process ended; its error is above")
            answer = json.loads(line)
            wrong += answer["checksum"] != checksum(flat)
            seconds = answer["seconds"]
        receiver.stdin.close()
        receiver.wait()
    speed = buffer.numel() / seconds / 1e9
    found = f"{BUCKETS - wrong} of {BUCKETS} buckets of {buffer.numel() / 1e6:.0f} MB arrived as sent; {speed:.1f} GB/s"
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
        flat = pickle.loads(base64.b64decode(line))["flat"]
        own = torch.empty_like(flat)
        _synchronise(flat.device.type)
        start = time.perf_counter()
        own.copy_(flat)
        _synchronise(flat.device.type)
        seconds = time.perf_counter() - start
        print(json.dumps({"checksum": checksum(own), "seconds": seconds}), flush=True)


def _pickled(payload: dict[str, Any]) -> str:
    file = io.BytesIO()
    ForkingPickler(file, pickle.HIGHEST_PROTOCOL).dump(payload)
    return base64.b64encode(file.getvalue()).decode()


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    receive()
