"""The search APIs of the web as settings of the hooks: addresses, keys, limits; each against a local server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

import generate_with_search
from generate_with_search import SearchSettings
from tests.scripted import serving
from tests.web_backends import BACKENDS, KEY, NOTHING

every_backend = pytest.mark.parametrize("name", BACKENDS)
VARIABLES = {
    "wikipedia": {"WIKIPEDIA_CONTACT": "me@a.test"},
    "deepseek": {"DEEPSEEK_KEY": KEY},
    "zhihu": {"ZHIHU_SEARCH_KEYS": f"{KEY}, {KEY}2,"},
    "searxng": {},
}
ADDRESSES = {"wikipedia": "url", "deepseek": "base_url", "zhihu": "url", "searxng": "search_url"}
ALL_VARIABLES = ("SERPER_API_KEY", "WIKIPEDIA_CONTACT", "DEEPSEEK_API_KEY", "DEEPSEEK_KEY", "ZHIHU_SEARCH_KEYS")


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working folder without a `.env`, and an environment without keys, restored afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ALL_VARIABLES:
        monkeypatch.setenv(name, "")  # so that what `.env` sets is taken back
        monkeypatch.delenv(name)
    return tmp_path


def hook_args(name: str, **part: Any) -> Any:
    return SimpleNamespace(custom_config={"search_r1": {"search_backend": name, name: part}})


@every_backend
def test_the_hooks_search_through_it(name: str, no_keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in VARIABLES[name].items():
        monkeypatch.setenv(variable, value)

    async def run() -> list[Any]:
        async def handler(request: web.Request) -> web.Response:
            return web.json_response(BACKENDS[name][1])

        async with serving(handler, "" if name == "deepseek" else "/search") as url:
            args = hook_args(name, **{ADDRESSES[name]: url})
            generate_with_search.check_args(args)
            await generate_with_search.check_services(args)
            return await generate_with_search.search(args, "big cities")

    assert [tuple(passage) for passage in asyncio.run(run())] == BACKENDS[name][2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wikipedia", "export WIKIPEDIA_CONTACT="),
        ("deepseek", "expects DEEPSEEK_API_KEY or DEEPSEEK_KEY"),
        ("zhihu", "expects ZHIHU_SEARCH_KEYS"),
    ],
)
def test_a_missing_key_is_told_before_anything_starts(name: str, message: str, no_keys: Path) -> None:
    with pytest.raises(ValueError, match=message):
        generate_with_search.check_args(hook_args(name))


def test_keys_come_from_env_in_the_working_folder(no_keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_keys / ".env").write_text(f"DEEPSEEK_API_KEY={KEY}\nSERPER_API_KEY='of the file'\n")
    monkeypatch.setenv("SERPER_API_KEY", "of the environment")
    generate_with_search.check_args(hook_args("deepseek"))
    assert os.environ["DEEPSEEK_API_KEY"] == KEY
    assert os.environ["SERPER_API_KEY"] == "of the environment"


def test_the_example_names_every_variable() -> None:
    text = (Path(__file__).resolve().parents[1] / ".env.example").read_text()
    assert all(f"{name}=" in text or f"({name} " in text for name in ALL_VARIABLES)


@pytest.mark.parametrize(("name", "limit"), [("wikipedia", 3), ("deepseek", 16), ("zhihu", 1), ("searxng", 8)])
def test_each_has_a_limit_of_its_own(name: str, limit: int, no_keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in VARIABLES[name].items():
        monkeypatch.setenv(variable, value)
    under_way = most = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        return web.json_response(NOTHING[name])

    async def run() -> None:
        async with serving(handler, "" if name == "deepseek" else "/search") as url:
            args = hook_args(name, **{ADDRESSES[name]: url})
            await asyncio.gather(*(generate_with_search.search(args, f"q{i}") for i in range(2 * limit + 1)))

    asyncio.run(run())
    assert most == limit
    assert SearchSettings.of(hook_args(name)).search_concurrency == 256
