"""What would keep Ray from starting, told before it starts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from sleuth.cluster import ray_environment
from sleuth.cluster.ray_environment import (
    NICENESS,
    OMP_WAITING,
    check_address,
    check_ray,
    cluster_address,
    passed_on,
    prepare_environment,
)
from sleuth.paths import WORKING_FOLDER, enter_working_folder


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "MASTER_ADDR",
        "RAY_ADDRESS",
        "RAY_TMPDIR",
        "TMPDIR",
        NICENESS,
        OMP_WAITING,
        "RAY_AUTH_TOKEN",
        "no_proxy",
        "NO_PROXY",
    ):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


@pytest.fixture
def silent() -> Iterator[str]:
    """Something that listens and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def arguments(address: str | None = None, nodes: int = 1) -> Any:
    return SimpleNamespace(ray_address=address, actor_num_nodes=nodes)


def test_the_head_of_a_job_is_joined_where_several_nodes_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert cluster_address(arguments()) is None  # a launcher of jobs sets it for one node, too
    assert cluster_address(arguments(nodes=2)) == ("10.0.0.1:6379", "MASTER_ADDR")
    assert cluster_address(arguments("local", nodes=2)) is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:1234")
    assert cluster_address(arguments(nodes=2)) == ("10.0.0.2:1234", "RAY_ADDRESS")


def test_actors_get_the_variables_of_the_network() -> None:
    network = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert passed_on({**network, "SERPER_API_KEY": "secret", "PATH": "/bin"}) == network | {WORKING_FOLDER: os.getcwd()}


def test_an_actor_works_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv(WORKING_FOLDER, str(tmp_path))
    enter_working_folder()
    assert Path.cwd() == tmp_path
    monkeypatch.setenv(WORKING_FOLDER, str(tmp_path / "not-here"))
    enter_working_folder()
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_too_deep_for_sockets_is_told_with_its_variable(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "/tmp/" + "d" * 60)
    with pytest.raises(ValueError, match=rf"^{variable}: expected a path of at most \d\d bytes, .* found 65: /tmp/d"):
        check_ray(arguments())


def test_the_bound_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = len(str(os.getpid()))
    rest = len("/ray/session_2026-11-30_15-25-40_123456_/sockets/plasma_store") + pid
    monkeypatch.setenv("TMPDIR", "/" + "ä" * ((107 - rest - 1) // 2))  # two bytes each
    check_ray(arguments())
    monkeypatch.setenv("TMPDIR", "/" + "d" * (107 - rest))
    with pytest.raises(ValueError, match=f"at most {107 - rest} bytes"):
        check_ray(arguments())
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # Ray prefers it
    check_ray(arguments())


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nowhere.invalid:6379", "http://127.0.0.1:9"])
def test_an_address_that_leads_nowhere_is_told_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=rf"^RAY_ADDRESS: expected a Ray cluster at {address}, found none \(.*\); "):
        check_ray(arguments())
    with pytest.raises(ValueError, match=r"^--ray-address: expected a Ray cluster at 127"):
        check_ray(arguments("127.0.0.1:9"))


@pytest.mark.parametrize("address", ["somewhere", "host:port", "127.0.0.1"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match=f"expected host:port, ray://host:port or auto, found {address}"):
        check_ray(arguments(address))


def test_no_ray_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_environment, "find_running", lambda: None)
    with pytest.raises(ValueError, match="--ray-address auto: expected a Ray that runs on this machine, found none"):
        check_ray(arguments("auto"))


def test_what_does_not_answer_is_told_in_time(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_environment, "ANSWER_SECONDS", 1.0)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"did not answer as Ray does within 1 s"):
        check_address(silent, "RAY_ADDRESS")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, None),
        (grpc.StatusCode.UNAVAILABLE, "did not answer as Ray does"),
        (grpc.StatusCode.UNIMPLEMENTED, None),
    ],
)
def test_a_ray_that_wants_a_token_is_one(status: grpc.StatusCode, told: str | None) -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(status, "no")
        return b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(refuse, request_deserializer=bytes, response_serializer=bytes)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        trouble = ray_environment._answer_trouble(f"127.0.0.1:{port}")
    finally:
        server.stop(0)
    assert (trouble is None) == (told is None)
    assert (told or "") in (trouble or "")


def test_what_answers_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", f"localhost:{port}"):
            check_address(address, "RAY_ADDRESS")
    finally:
        server.stop(0)


def test_a_local_ray_is_asked_for_nothing() -> None:
    check_ray(arguments("local"))
    check_ray(arguments())


def test_the_environment_of_a_ray_that_is_started_here() -> None:
    prepare_environment(None)
    assert os.environ[NICENESS] == "0"
    assert os.environ[OMP_WAITING] == "passive"
    assert os.environ["no_proxy"].startswith("127.0.0.1,localhost,::1,")
    os.environ |= {NICENESS: "7", OMP_WAITING: "active"}
    prepare_environment(None)
    assert (os.environ[NICENESS], os.environ[OMP_WAITING]) == ("7", "active"), "the user's own stays"


def test_the_environment_of_a_cluster_that_is_joined() -> None:
    prepare_environment("ray://head.example:10001")
    assert os.environ["NO_PROXY"].endswith(",head.example")
    assert NICENESS not in os.environ
