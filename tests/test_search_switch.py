"""The search backend is switched in the dictionary, in YAML, by flags and by the run script, in this order of rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import generate_with_search
from sleuth.arguments import Args, parse_args
from sleuth.cluster.preflight import preflight, with_hook_settings
from sleuth.hooks import hook_modules
from tests.scripted import serving
from tests.test_launch_scripts import dry_run

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "data/demo"
FLAGS = [
    *("--hf-checkpoint", str(DEMO / "model"), "--prompt-data", str(DEMO / "train.parquet"), "--apply-chat-template"),
    *("--colocate", "--num-rollout", "1"),
    *("--custom-generate-function-path", "generate_with_search.generate"),
    *("--custom-rm-path", "generate_with_search.reward_func"),
]


def resolved(*flags: str) -> dict:
    args = parse_args([*FLAGS, *flags])
    return with_hook_settings(args, hook_modules(args)).custom_config["search_r1"]


@pytest.fixture
def google_in_yaml(tmp_path: Path) -> str:
    path = tmp_path / "search.yaml"
    path.write_text("search_r1: {search_backend: google, topk: 7}\n")
    return str(path)


def test_each_place_outranks_the_one_before(monkeypatch: pytest.MonkeyPatch, google_in_yaml: str) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "a-key")
    assert resolved()["search_backend"] == "local"
    monkeypatch.setitem(generate_with_search.SEARCH_R1_CONFIGS, "topk", 5)
    assert resolved()["topk"] == 5
    assert resolved("--custom-config-path", google_in_yaml)["topk"] == 7
    assert resolved("--custom-config-path", google_in_yaml)["search_backend"] == "google"
    found = resolved("--custom-config-path", google_in_yaml, "--search-backend", "local", "--search-url", "http://a/b")
    assert (found["search_backend"], found["local"]["search_url"], found["topk"]) == ("local", "http://a/b", 7)


def test_the_dictionary_alone_switches_to_google(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(generate_with_search.SEARCH_R1_CONFIGS, "search_backend", "google")
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(ValueError, match="export SERPER_API_KEY"):
        resolved()
    monkeypatch.setenv("SERPER_API_KEY", "a-key")
    assert resolved()["search_backend"] == "google"


def test_a_backend_outranks_the_address_of_another_one_in_a_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "a-key")
    path = tmp_path / "search.yaml"
    path.write_text("search_r1: {search_backend: local, local: {search_url: 'http://a/b'}}\n")
    found = resolved("--custom-config-path", str(path), "--search-backend", "google")
    assert (found["search_backend"], found["local"]["search_url"]) == ("google", "http://a/b")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--search-backend", "gogle"], "no search backend is named 'gogle'; expected local, google"),
        (["--search-url", "http://127.0.0.1:8000"], "local.search_url: has no path; add the path"),
        (["--search-backend", "google", "--search-url", "http://a/b"], "--search-url has an effect with .* local only"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "a-key")
    with pytest.raises(ValueError, match=message):
        resolved(*flags)


def test_a_search_flag_that_no_hook_reads_is_refused() -> None:
    args = parse_args([*FLAGS, "--custom-generate-function-path", "examples.calculator.generate"])
    args = args.model_copy(update={"search_backend": "local", "custom_rm_path": "examples.calculator.reward_func"})
    with pytest.raises(ValueError, match="--search-backend has no effect: none of the hooks"):
        with_hook_settings(args, hook_modules(args))


def test_the_script_gives_only_what_its_user_gave(google_in_yaml: str) -> None:
    """With google in the file and no key, the run must not use the local server silently."""
    result = dry_run("--custom-config-path", google_in_yaml)
    assert result.returncode == 2
    assert "export SERPER_API_KEY" in result.stderr
    result = dry_run("--custom-config-path", google_in_yaml, SEARCH_BACKEND="local", SEARCH_URL="http://127.0.0.1:9/x")
    assert result.returncode == 0, result.stderr
    assert "http://127.0.0.1:9/x" in result.stdout
    assert "expected the search backend local to answer a test question" in result.stdout  # a note: it may start later


def train(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SERPER_API_KEY"} | variables
    command = [sys.executable, "train.py", *FLAGS, *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_train_refuses_google_without_a_key(google_in_yaml: str) -> None:
    for flags in (["--custom-config-path", google_in_yaml], ["--search-backend", "google"]):
        result = train(*flags)
        assert result.returncode == 1
        assert "export SERPER_API_KEY" in result.stderr


def test_train_tells_of_a_server_that_is_down_before_ray_starts(tmp_path: Path) -> None:
    result = train("--search-url", "http://127.0.0.1:9/retrieve", "--run-dir", str(tmp_path / "run"))
    assert result.returncode == 1
    for part in ("127.0.0.1:9", "retrieval_server.py", "--search-url", "--no-search-check"):
        assert part in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_resolved_section_is_saved_and_reads_back(tmp_path: Path, google_in_yaml: str) -> None:
    args = parse_args([*FLAGS, "--custom-config-path", google_in_yaml, "--search-backend", "local"])
    args = with_hook_settings(args, hook_modules(args))
    args.write(tmp_path / "config.yaml")
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["search_r1"]["search_backend"] == "local"
    assert saved["search_r1"]["max_turns"] == 2
    again = parse_args(["--custom-config-path", str(tmp_path / "config.yaml")])
    assert with_hook_settings(again, hook_modules(again)).custom_config == args.custom_config


def test_preflight_asks_the_server_one_question() -> None:
    import asyncio
    import threading

    from aiohttp import web

    asked: list[dict] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"result": [[{"document": {"contents": '"France"\nParis'}, "score": 1.0}]]})

    started, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with serving(answer, "/retrieve") as url:
            urls.append(url)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(10)
        args: Args = preflight(parse_args([*FLAGS, "--search-url", urls[0]]))
    finally:
        stop.set()
        thread.join()
    assert [body["queries"] for body in asked] == [["capital of France"]]
    assert args.custom_config["search_r1"]["local"]["search_url"] == urls[0]
    assert args.num_layers is not None
