"""A Ray cluster of several nodes on this machine: raylets at 127.0.0.2, 127.0.0.3, ..., each with its own address.

On Linux all of 127.0.0.0/8 is this machine, so what one node sends to another goes over real sockets, and a server that
listens on the wrong address is not found. The nodes share disk, memory and CUDA devices (none).
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """`environment` is what a process needs to join as a user would; `nodes[0]` is the head's process."""

    addresses: Sequence[str]
    nodes: Sequence[subprocess.Popen[bytes]]
    environment: dict[str, str]


@contextmanager
def ray_cluster(folder: Path, devices: Sequence[int]) -> Iterator[Cluster]:
    """Nodes with `devices[i]` slots each, at 127.0.0.(2 + i); all of them end with the block.

    Ray's sockets and logs are below `folder`, whose path must be short.
    """
    addresses = [f"127.0.0.{2 + i}" for i in range(len(devices))]
    port = _free_port(addresses[0])
    head = f"{addresses[0]}:{port}"
    environment = {
        "RAY_ADDRESS": head,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_worker_niceness": "0",
        "RAY_raylet_start_wait_time_s": "150",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": str(ROOT),
    }
    nodes = []
    try:
        for i, (address, slots) in enumerate(zip(addresses, devices, strict=True)):
            place = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
            words = place if i == 0 else [f"--address={head}"]
            words += [f"--node-ip-address={address}", f"--num-cpus={slots}", "--num-gpus=0"]
            words += ["--object-store-memory=200000000", "--disable-usage-stats", "--block"]
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
            with (folder / f"node_{i}.log").open("wb") as log:
                own = os.environ | environment
                del own["RAY_ADDRESS"]
                nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=own, start_new_session=True))
            _wait_for(folder / f"node_{i}.log", nodes[-1])
        yield Cluster(addresses, nodes, environment)
    finally:
        for node in reversed(nodes):
            node.terminate()  # with --block it ends its node's processes first
        for node in reversed(nodes):
            try:
                node.wait(timeout=60)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()


def _wait_for(log: Path, node: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "Ray runtime started" not in log.read_text():
        if node.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"a node of Ray did not start: {log.read_text()}")
        time.sleep(0.2)


def _free_port(address: str) -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])
