"""Servers of the tests' own: how they start, die and are stopped, and that they leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

import sleuth.engine.server as server_module
from sleuth.engine.actor import EngineActor
from sleuth.engine.key import engine_key, engine_session
from sleuth.engine.process_group import group_members, shared_memory_files
from sleuth.engine.server import (
    PACKAGE_ROOT,
    EngineConfig,
    EngineServer,
    EngineStartError,
    server_args,
    server_environment,
)
from sleuth.rollout.engine_client import EngineClient
from sleuth.weight_sync.control import WeightSyncError
from sleuth.weight_sync.tensor import push_weights
from tests.conftest import RunningEngine, load_float32
from tests.tiny_models import make_tiny_model

OWNER = """
import json, sys, time
from sleuth.engine.server import EngineConfig, EngineServer
server = EngineServer(EngineConfig(sys.argv[1], log_path=sys.argv[2]))
server.start()
print(json.dumps({"pid": server.pid, "folder": str(server._folder)}), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3")


def remains_of(server: EngineServer) -> tuple[list[psutil.Process], set[Path]]:
    """What a stopped server must not leave: its processes and its shared memory."""
    assert server.pid is not None
    members, files = group_members(server.pid), shared_memory_files(server.pid)
    assert len(members) >= 3, "the server, its scheduler and its detokenizer"
    assert files, "semaphores and the scheduler's load report"
    return members, files


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.mark.engine
def test_an_engine_answers_only_whoever_has_the_key(engine: RunningEngine) -> None:
    key, url, origin = engine_key(), engine.url, {"Origin": "https://elsewhere.example"}
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    for path in ("generate", "update_weights_from_disk", "flush_cache", "pause_generation", "abort_request"):
        assert requests.post(f"{url}/{path}", json=body, headers=origin, timeout=10).status_code == 401
        wrong = {"Authorization": f"Bearer {key[:-1]}x"}
        assert requests.post(f"{url}/{path}", json=body, headers=wrong, timeout=10).status_code == 401
    assert requests.get(f"{url}/server_info", timeout=10).status_code == 401
    with engine_session() as session:
        answer = session.post(f"{url}/generate", json=body, headers=origin, timeout=60)
        preflight = session.options(f"{url}/generate", headers=origin | {"Access-Control-Request-Method": "POST"})
    assert answer.status_code == 200
    allowed = {name for reply in (answer, preflight) for name in reply.headers if name.startswith("access-control")}
    assert allowed == set()

    assert "server_args" in engine.server.log_path.read_text()
    assert key not in engine.server.log_path.read_text()
    commands = [" ".join(process.cmdline()) for process in group_members(engine.server.pid)]
    assert all(key not in command for command in commands)


@pytest.mark.engine
@pytest.mark.timeout(1200)  # starts two servers in turn
def test_an_actor_starts_notices_death_restarts_and_leaves_nothing(model_path: Path, tmp_path: Path) -> None:
    actor = EngineActor(EngineConfig(model_path, log_path=tmp_path / "engine.log"), engine_key())
    server = actor._server
    try:
        first = actor.start()
        assert actor.look()[1] is None
        with pytest.raises(RuntimeError, match="already runs"):
            actor.start()
        actor.release_memory()
        assert actor.look()[1] is None  # asked for a token, it would die now
        actor.resume_memory(("weights",))
        actor.resume_memory(("kv_cache",))
        assert actor.look()[1] is None
        members, files = remains_of(server)
        scheduler = next(p for p in members if "scheduler" in " ".join(p.cmdline()))
        scheduler.suspend()
        deadline = time.monotonic() + 30
        while scheduler.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.1)  # a thread stops when it next gets the processor
        assert f"is stopped (SIGSTOP; `kill -CONT {scheduler.pid}` lets it go on)" in (actor.look()[1] or "")
        scheduler.resume()
        assert actor.look()[1] is None

        # A killed scheduler takes the server down: that is noticed, and another can be started.
        scheduler.kill()
        deadline = time.monotonic() + 60
        while server.is_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not server.is_alive()
        assert "killed by signal" in (actor.look()[1] or "")
        assert "SIGQUIT" in server.log_tail()
        with pytest.raises(WeightSyncError, match="cannot be reached"):
            push_weights([first], load_float32(model_path).state_dict().items(), "1")

        assert actor.start() != first
        assert actor.look()[1] is None
        more_members, more_files = remains_of(server)
    finally:
        actor.stop()
    assert not server.is_healthy()
    actor.stop()  # a second time does nothing
    assert wait_until_gone(members + more_members, 1) == []
    assert [file for file in files | more_files if file.exists()] == []
    assert not server._folder.exists()


@pytest.mark.engine
def test_the_server_dies_with_its_owner(model_path: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model_path), str(tmp_path / "engine.log")],
        cwd=PACKAGE_ROOT,
        stdout=subprocess.PIPE,
    )
    try:
        assert owner.stdout is not None
        started = json.loads(owner.stdout.readline())
        members = group_members(started["pid"])
        files = shared_memory_files(started["pid"])
        assert len(members) >= 3
        assert files
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert wait_until_gone(members, 20) == []
    assert [file for file in files if file.exists()] == []
    assert not Path(started["folder"]).exists()


@pytest.mark.engine
def test_a_failed_start_shows_the_log(tmp_path: Path) -> None:
    server = EngineServer(EngineConfig(tmp_path / "no-model", log_path=tmp_path / "engine.log"))
    with pytest.raises(EngineStartError, match=r"(?s)no-model ended with exit code.*engine\.log:.*no-model"):
        server.start()
    assert not server.is_alive()


@pytest.mark.engine
def test_a_start_ends_when_another_thread_stops_it(model_path: Path, tmp_path: Path) -> None:
    server = EngineServer(EngineConfig(model_path, log_path=tmp_path / "engine.log"))
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(server.start)
        while server.pid is None:
            time.sleep(0.01)
        pid = server.pid
        server.stop()
        with pytest.raises(EngineStartError, match="was stopped before it was ready"):
            starting.result(timeout=20)
    assert group_members(pid) == []
    assert not server.is_alive()


@pytest.mark.engine
def test_a_late_start_is_stopped(model_path: Path, tmp_path: Path) -> None:
    server = EngineServer(EngineConfig(model_path, log_path=tmp_path / "engine.log", start_timeout=2.0))
    with pytest.raises(EngineStartError, match="was not healthy after 2 s"):
        server.start()
    assert not server.is_alive()


@pytest.mark.engine
def test_proxies_and_a_deep_folder_for_temporary_files_do_not_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own question whether it is up, ours, weights, generation, and the paths of its sockets."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("deep" * 20)))
    Path(tempfile.gettempdir()).mkdir()
    model_path = make_tiny_model(tmp_path / "model", "qwen2")
    config = EngineConfig(model_path, log_path=tmp_path / "engine.log", start_timeout=400.0)
    with EngineServer(config) as server:
        push_weights([server.url], load_float32(model_path).state_dict().items(), "1")
        server.release_memory()
        server.resume_memory()

        async def ask() -> str | None:
            async with EngineClient([server.url], max_concurrency=1, vocab_size=512) as client:
                return (await client.generate([5, 6, 7], {"max_new_tokens": 2})).weight_version

        assert asyncio.run(ask()) == "1"


@pytest.mark.engine
def test_an_idle_engine_uses_no_cpu(engine: RunningEngine) -> None:
    assert engine.server.pid is not None
    members = group_members(engine.server.pid)
    time.sleep(1.0)

    def cpu_seconds() -> float:
        return sum(sum(member.cpu_times()[:2]) for member in members)

    before = cpu_seconds()
    time.sleep(3.0)
    assert (cpu_seconds() - before) / 3.0 < 0.2, "share of a core; without --sleep-on-idle it is 1"


def test_url_before_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="call start"):
        _ = EngineServer(EngineConfig("model", log_path=tmp_path / "log")).url


def value_of(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


def test_arguments_on_a_cpu() -> None:
    args = server_args(EngineConfig("model", seed=3), 1234, on_gpu=False)
    assert value_of(args, "--device") == "cpu"
    assert value_of(args, "--dtype") == "float32"
    assert value_of(args, "--random-seed") == "3"
    assert value_of(args, "--max-total-tokens") == "65536"
    assert "--sleep-on-idle" in args
    assert "--tp-size" not in args


def test_arguments_on_gpus() -> None:
    config = EngineConfig(
        "model",
        tensor_parallel_size=2,
        gpu_ids=("4", "6"),
        mem_fraction_static=0.7,
        enable_memory_saver=True,
        extra_args=("--attention-backend", "fa3"),
    )
    args = server_args(config, 1234, on_gpu=True)
    assert value_of(args, "--tp-size") == "2"
    assert "--base-gpu-id" not in args  # it counts from the first that it sees
    assert value_of(args, "--mem-fraction-static") == "0.7"
    assert value_of(args, "--dtype") == "bfloat16"
    assert "--enable-memory-saver" in args
    assert "--device" not in args
    assert args[-2:] == ["--attention-backend", "fa3"]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_servers_of_an_engine_on_two_nodes_meet(on_gpu: bool, tmp_path: Path) -> None:
    config = EngineConfig("model", tensor_parallel_size=16, nodes=2, node_rank=1, meeting="10.0.0.1:20001")
    args = server_args(config, 30_000, on_gpu)
    assert [args[args.index(name) + 1] for name in ("--nnodes", "--node-rank", "--dist-init-addr")] == [
        *("2", "1", "10.0.0.1:20001")
    ]
    assert args[args.index("--tp-size") + 1] == ("16" if on_gpu else "2")
    assert "--nnodes" not in server_args(EngineConfig("model"), 30_000, on_gpu)
    environment = server_environment(config, tmp_path, on_gpu)
    assert environment.get("SGLANG_CPU_OMP_THREADS_BIND") == (None if on_gpu else "0|0")


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    on_cpu = server_environment(EngineConfig("model", cpu_threads=2), tmp_path, on_gpu=False)
    on_gpu = server_environment(EngineConfig("model"), tmp_path, on_gpu=True)
    assert on_cpu["OMP_NUM_THREADS"] == "2"
    assert on_cpu["PYTHONPATH"].endswith(f"cpu_stubs{os.pathsep}{PACKAGE_ROOT}{os.pathsep}/mine")
    assert "cpu_stubs" not in on_gpu["PYTHONPATH"]


def test_the_memory_saver_gets_no_expandable_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    saving = server_environment(EngineConfig("model", enable_memory_saver=True), tmp_path, on_gpu=True)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in saving
    assert "PYTORCH_CUDA_ALLOC_CONF" in server_environment(EngineConfig("model"), tmp_path, on_gpu=True)


def test_the_memory_saver_finds_the_runtime_that_torch_came_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(sys, "path", ["/nowhere", str(tmp_path)])
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    saving = server_environment(EngineConfig("model", enable_memory_saver=True), tmp_path, on_gpu=True)
    assert saving["LD_LIBRARY_PATH"] == f"/mine:{library.parent}"
    other = server_environment(EngineConfig("model"), tmp_path, on_gpu=True)
    assert other["LD_LIBRARY_PATH"] == "/mine"
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    assert (
        server_environment(EngineConfig("model", enable_memory_saver=True), tmp_path, on_gpu=True)["LD_LIBRARY_PATH"]
        == "/mine"
    )


def test_graphs_can_be_released_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    monkeypatch.setenv(name, "1")
    colocated = EngineConfig("model", enable_memory_saver=True, releases_graphs=True)
    assert server_environment(colocated, tmp_path, on_gpu=True)[name] == "1"
    for kept in (EngineConfig("model"), EngineConfig("model", enable_memory_saver=True)):
        assert server_environment(kept, tmp_path, on_gpu=True)[name] == "0"


@pytest.mark.engine
def test_a_port_that_is_taken_meanwhile_is_replaced(tmp_path, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = iter([other.getsockname()[1], server_module.free_port()])
        monkeypatch.setattr(server_module, "free_port", lambda host: next(ports))
        config = EngineConfig(make_tiny_model(tmp_path / "model", "qwen2"), log_path=tmp_path / "engine.log")
        with EngineServer(config) as server:
            assert server.is_healthy()
            assert server.url != f"http://127.0.0.1:{other.getsockname()[1]}"
