"""Checks, before Ray starts, what would keep it from starting, and sets the environment variables that it reads."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping
from datetime import datetime

import grpc
import ray
from ray._private.services import canonicalize_bootstrap_address

from sleuth.arguments import Args
from sleuth.loopback import without_proxy
from sleuth.paths import WORKING_FOLDER

MAX_SOCKET_PATH = 107
"""Bytes of the path of a Unix socket, on Linux."""
NICENESS = "RAY_worker_niceness"
OMP_WAITING = "OMP_WAIT_POLICY"
_ARE_YOU_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
CONNECT_SECONDS = ANSWER_SECONDS = 8.0
HEAD_PORT = 6379
"""That of `ray start --head`, if nobody names another."""
PASSED_ON = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TP_SOCKET_", "UCX_", "FI_", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Beginnings of names of variables that say how processes reach each other."""


def cluster_address(args: Args) -> tuple[str, str] | None:
    """The address of the cluster to join, and the setting that names it; None if one is started on this machine.

    MASTER_ADDR, which launchers of jobs set, too, counts only where the trainer is to run on several nodes.
    """
    for source, address in (("--ray-address", args.ray_address), ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"))):
        if address:
            return None if address == "local" else (address, source)
    if args.actor_num_nodes > 1 and (master := os.environ.get("MASTER_ADDR")):
        return f"{master}:{HEAD_PORT}", "MASTER_ADDR"
    return None


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What the actors of a run get of `environment`: on other nodes they would have only what Ray was started with.

    Those are the variables of NCCL, gloo and the network, such as NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, and where
    the run was started.
    """
    network = {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}
    return network | {WORKING_FOLDER: os.getcwd()}


def check_ray(args: Args) -> None:
    """Raise ValueError if Ray cannot be started or joined as configured; takes at most 16 s plus a DNS look-up."""
    found = cluster_address(args)
    if found is None:
        check_socket_paths()
    else:
        check_address(*found)


def check_socket_paths() -> None:
    """Raise ValueError if the path of the temporary folder is too long for the sockets that Ray would put there."""
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    if variable is None:
        return  # Ray takes /tmp
    folder = os.environ[variable]
    session = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{os.getpid()}"
    length = len(os.fsencode(os.path.join(folder, "ray", session, "sockets", "plasma_store")))
    if length > MAX_SOCKET_PATH:
        most = MAX_SOCKET_PATH - length + len(os.fsencode(folder))
        raise ValueError(
            f"{variable}: expected a path of at most {most} bytes, since Ray's sockets lie far below it, found "
            f"{len(os.fsencode(folder))}: {folder}; shorten {variable}, or set RAY_TMPDIR=/tmp"
        )


def check_address(address: str, source: str) -> None:
    """Raise ValueError if nothing answers like Ray at `address`, which the setting `source` names."""
    target = find_running() if address == "auto" else address
    if target is None:
        raise ValueError(
            f"{source} auto: expected a Ray that runs on this machine, found none; start one with `ray start --head`, "
            f"or leave {source} out and one is started for the run"
        )
    match = re.fullmatch(r"(?:(\w+)://)?\[?(.+?)\]?:(\d+)/?", target)
    if match is None:
        raise ValueError(f"{source}: expected host:port, ray://host:port or auto, found {target}; correct it")
    scheme, host, port = match[1], match[2], int(match[3])
    trouble = _connection_trouble(host, port)
    if trouble is None and scheme not in ("http", "https") and "RAY_USE_TLS" not in os.environ:
        trouble = _answer_trouble(target.removeprefix(f"{scheme}://").rstrip("/"))
    if trouble:
        raise ValueError(
            f"{source}: expected a Ray cluster at {target}, found none ({trouble}); correct {source}, or leave it out "
            "and a Ray is started on this machine"
        )


def find_running() -> str | None:
    """The address that Ray itself would use for "auto"."""
    try:
        return canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return None


def _connection_trouble(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return None


def _answer_trouble(address: str) -> str | None:
    """What shows that no Ray runs at `address`: no answer, or that of a web server (some networks accept connections).

    A refusal in gRPC's own protocol, for example because a token is missing, shows that Ray runs there.
    """
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary(_ARE_YOU_ALIVE, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=ANSWER_SECONDS, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                return f"what listens there did not answer as Ray does within {ANSWER_SECONDS:.0f} s"
            if "http2 header with status" in error.details():
                return "a web server listens there"
    return None


def prepare_environment(address: str | None) -> None:
    """Set the variables that Ray and its processes read; call before `ray.init` (`address` None: Ray starts here)."""
    hosts = re.findall(r"(?:\w+://)?\[?(.+?)\]?:\d+", address or "")
    os.environ.update(without_proxy(os.environ, ray.util.get_node_ip_address(), *hosts))
    if address is None:
        # Ray would write a token for its own use into the user's home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
        # Ray runs its workers at nice 15: beside ordinary processes a whole run would starve.
        os.environ.setdefault(NICENESS, "0")
        # OpenMP's threads spin while they wait for each other. On a machine with other work a spinning thread holds the
        # core that the awaited one needs: a training step of the demo took 55 s, and 5.5 s with threads that sleep.
        os.environ.setdefault(OMP_WAITING, "passive")
