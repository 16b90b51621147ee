"""A Ray cluster of two nodes on this machine, each with an address of its own.

Either their raylets are at 127.0.0.2 and 127.0.0.3: on Linux all of 127.0.0.0/8 is this machine, so what one node sends
to the other goes over real sockets. Or each node has a network namespace: an interface, a loopback and ports of its
own, and a cable to the other. What listens on the wrong address, or takes 127.0.0.1 for the other node, is not found
there. The nodes share disk, memory and CUDA devices (none).
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """`environment` is what a process needs to join as a user would; `nodes[0]` is the head's process.

    `first`: words before a command that has to run on the first node.
    """

    addresses: Sequence[str]
    nodes: Sequence[subprocess.Popen[bytes]]
    environment: dict[str, str]
    first: Sequence[str] = ()


def may_make_namespaces() -> bool:
    """Whether this process may make network namespaces (it is root, and not in a container that forbids it)."""
    name = f"sleuth-{os.getpid()}"
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


@contextmanager
def namespaces() -> Iterator[tuple[list[str], list[list[str]]]]:
    """Two network namespaces with a cable between them: their addresses, and the words that run a command in each."""
    names = [f"sleuth-{os.getpid()}-{end}" for end in "ab"]
    cables = [f"sl{os.getpid()}{end}" for end in "ab"]
    addresses = ["10.77.0.2", "10.77.0.3"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for interface in ("lo", cable):
                _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", name, "route", "add", "default", "dev", cable)  # as a machine that has a way out
        yield addresses, [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def ray_cluster(
    folder: Path, devices: Sequence[int], *, apart: bool = False, hidden: Path | None = None
) -> Iterator[Cluster]:
    """Two nodes with `devices[i]` slots each, `apart` in namespaces of their own; both end with the block.

    The second node finds the folder `hidden` empty. Ray's sockets and logs are below `folder`: its path must be short.
    """
    loopback = nullcontext((["127.0.0.2", "127.0.0.3"], [[], []]))
    with namespaces() if apart else loopback as (addresses, places):
        if hidden is not None:
            empty = f'mount -t tmpfs none "{hidden}" && exec "$@"'
            places[1] = [*places[1], "unshare", "--mount", "sh", "-c", empty, "sh"]
        yield from _ray_cluster(folder, devices, addresses, places)


def _ray_cluster(
    folder: Path, devices: Sequence[int], addresses: list[str], places: list[list[str]]
) -> Iterator[Cluster]:
    port = _free_port("127.0.0.2")
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
            command = [*places[i], sys.executable, "-m", "ray.scripts.scripts", "start", *words]
            with (folder / f"node_{i}.log").open("wb") as log:
                own = os.environ | environment
                del own["RAY_ADDRESS"]
                nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=own, start_new_session=True))
            _wait_for(folder / f"node_{i}.log", nodes[-1])
        yield Cluster(addresses, nodes, environment, places[0])
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
