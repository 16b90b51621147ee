"""SGLang's router in front of two real engines: what a run asks of it, and what happens when something dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sleuth.engine.key import engine_session
from sleuth.engine.router import RouterError, RouterProcess, router_args
from sleuth.engine.server import EngineConfig, EngineServer
from sleuth.loopback import direct_session
from sleuth.rollout.engine_client import EngineClient, EngineError
from sleuth.weight_sync.tensor import push_weights
from tests.conftest import RunningEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SAMPLING = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
PROMPT = list(range(20, 84))


@pytest.fixture(scope="module")
def second(session_engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    log = tmp_path_factory.mktemp("second") / "engine.log"
    model = session_engine.server.config.model_path
    with EngineServer(EngineConfig(model, dtype="float32", log_path=log)) as server:
        yield server


@pytest.fixture(scope="module")
def router(session_engine: RunningEngine, second: EngineServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with RouterProcess([session_engine.url, second.url], tmp_path_factory.mktemp("router") / "router.log") as process:
        yield process


def use(router: RouterProcess, action: Callable[[EngineClient], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        settings = {"vocab_size": 512, "max_concurrency": 64, "router_url": router.url, "first_wait": 0.05} | options
        async with EngineClient(router.engine_urls, **settings) as client:
            return await action(client)

    return asyncio.run(run())


def test_requests_go_through_it_and_log_probs_are_the_engines(engine: RunningEngine, router: RouterProcess) -> None:
    push_weights(router.engine_urls, engine.model.state_dict().items(), "same")
    generation = use(router, lambda client: client.generate(PROMPT, SAMPLING))
    expected = engine.log_probs(PROMPT + generation.ids, 1.0)[len(PROMPT) - 1 :]
    assert generation.log_probs == pytest.approx(expected, abs=1e-4)
    assert generation.weight_version == "same"  # the engines got the weights, not the router


def test_it_asks_for_the_engines_key(engine: RunningEngine, router: RouterProcess) -> None:
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING}
    with direct_session() as stranger:
        assert stranger.post(f"{router.url}/generate", json=body, timeout=60).status_code == 401
    with engine_session() as session:
        assert session.post(f"{router.url}/generate", json=body, timeout=60).status_code == 200


def test_turns_of_a_trajectory_find_their_beginning(engine: RunningEngine, router: RouterProcess) -> None:
    for url in router.engine_urls:
        engine_session().post(f"{url}/flush_cache", timeout=60).raise_for_status()

    async def turns(client: EngineClient) -> float:
        ids = [100 + (7 * i) % 300 for i in range(96)]
        await client.generate(ids, SAMPLING)
        client.take_cached_share()
        for _ in range(4):
            ids = [*ids, 101, 102, 103, 104]
            ids = ids + (await client.generate(ids, SAMPLING)).ids
        return client.take_cached_share()

    assert use(router, turns) > 0.8


def test_an_engine_that_is_down_is_left_out(engine: RunningEngine, router: RouterProcess, second: EngineServer) -> None:
    second.stop()

    async def many(client: EngineClient) -> list[Any]:
        prompts = [[*PROMPT, 100 + i] for i in range(16)]
        return await asyncio.gather(*(client.generate(prompt, SAMPLING) for prompt in prompts))

    assert all(len(generation.ids) == 8 for generation in use(router, many))


def test_a_router_that_dies_is_named(engine: RunningEngine, tmp_path: Path) -> None:
    with RouterProcess([engine.url], tmp_path / "router.log") as router:
        assert router.trouble() is None
        assert router._process
        os.killpg(router._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=f"{router.url}/generate cannot be reached"):
            use(router, lambda client: client.generate(PROMPT, SAMPLING), attempts=2)
        assert router.trouble() == (
            f"the router at {router.url} ended with exit code -9; its log: {tmp_path / 'router.log'}"
        )


def test_stopping_it_leaves_no_process(engine: RunningEngine, tmp_path: Path) -> None:
    router = RouterProcess([engine.url], tmp_path / "router.log")
    router.start()
    assert router._process
    children = psutil.Process(router._process.pid).children(recursive=True)
    assert children
    router.stop()
    psutil.wait_procs(children, timeout=5)
    assert not any(child.is_running() for child in children)
    assert engine.server.is_alive()


def test_it_ends_with_its_owner(engine: RunningEngine, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from sleuth.engine.router import RouterProcess\n"
        f"router = RouterProcess([{engine.url!r}], Path({str(tmp_path / 'router.log')!r}))\n"
        "router.start(); print(router._process.pid, flush=True); sys.stdin.read()"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        watch = psutil.Process(int(owner.stdout.readline()))
        family = [watch, *watch.children(recursive=True)]
        owner.kill()
    psutil.wait_procs(family, timeout=10)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)


def test_a_router_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    monkeypatch.setattr("sleuth.engine.router.router_args", lambda *_: ["--no-such-option"])
    with pytest.raises(RouterError, match=r"ended with exit code 2(?s:.*)--no-such-option"):
        RouterProcess(["http://127.0.0.1:1"], tmp_path / "router.log").start()
    assert time.monotonic() - started < 60


def test_health_is_asked_without_generating() -> None:
    words = router_args(["http://a", "http://b"], "127.0.0.1", 5, 6, 60)
    assert words[:3] == ["--worker-urls", "http://a", "http://b"]
    assert words[words.index("--health-check-endpoint") + 1] == "/model_info"  # /health generates
