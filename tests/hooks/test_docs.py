"""The code of docs/hooks.md runs: its files are hooks that can be named by flags, its other blocks are executed."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from sleuth.hooks import (
    FailSample,
    RolloutContext,
    Sample,
    StopRunError,
    TokenTrace,
    context,
    drain_step_metrics,
    load_hook,
    use_rollout_context,
)
from sleuth.hooks.loader import _CONTRACTS, HookKind
from sleuth.hooks.testing import ScriptedEngine, converse
from tests.scripted import make_plain_bpe_tokenizer, serving
from tools import try_hook

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/hooks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FILES = {block.split("\n")[0].removeprefix("# "): block for block in BLOCKS if re.match(r"# \w+\.py\n", block)}
ANSWERS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
TOKENIZER = make_plain_bpe_tokenizer()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files, where the command is typed."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    context._step_metrics[:] = [drain for drain in context._step_metrics if drain.__module__ != "my_judge"]
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_there_are_files_and_other_blocks():
    assert set(FILES) == {"my_lookup.py", "my_backend.py", "my_own_way.py", "my_judge.py", "my_filter.py"}
    assert len(BLOCKS) > len(FILES)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("my_lookup.generate", "generate"),
        ("my_own_way.generate", "generate"),
        ("my_judge.reward_func", "reward"),
        ("my_filter.some_right_some_wrong", "filter"),
        ("my_backend.search", "search"),
    ],
)
def test_the_files_are_hooks(path: str, kind: HookKind):
    assert callable(load_hook(path, kind))


def test_the_other_blocks_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    namespace: dict[str, Any] = {}
    for block in BLOCKS:
        if block not in FILES.values():
            exec(compile(block, "docs/hooks.md", "exec"), namespace)
    assert namespace["sample"].reward == 0.0


@pytest.mark.parametrize("kind", ["generate", "reward", "tis", "filter"])
def test_the_contracts_are_those_of_the_loader(kind: HookKind):
    contract = _CONTRACTS[kind]
    assert f"| `{contract.flag}` |" in PAGE
    assert contract.signature.split(" -> ")[0] in PAGE


def test_the_command_of_the_page_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    (folder / "answers.yaml").write_text(ANSWERS)
    flags = ["--custom-generate-function-path", "my_lookup.generate", "--search-backend", "my_backend.search"]
    data = ["--prompt-data", str(ROOT / "data/demo/train.parquet"), "--apply-chat-template"]
    assert try_hook.main([*flags, *data, "--rows", "2", "--scripted", "answers.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.count("<found>Its capital is Paris.</found>") == 2
    assert "search/requests " in out


def test_a_trace_that_is_filled_without_a_conversation():
    sample, _ = converse(load_hook("my_own_way.generate", "generate"), ["search"], tokenizer=TOKENIZER)
    sample.trace.check(1000)
    assert [segment.source for segment in sample.trace.segments] == ["model", "observation"]


def test_the_filter():
    keep = load_hook("my_filter.some_right_some_wrong", "filter")
    group = [Sample(i, 0, "p", TokenTrace([1]), reward_components={"exact_match": float(i)}) for i in range(2)]
    assert keep(None, group)
    assert not keep(None, group[:1])


def judged(status: int) -> Any:
    """The reward of a sample where the judge, a real server, answers with a status; and the module."""
    reward = load_hook("my_judge.reward_func", "reward")
    module = sys.modules["my_judge"]

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["strictness"] == 0.75
        return web.json_response({"score": 0.25, "remark": body["text"]}, status=status)

    async def run() -> Any:
        sample = Sample(0, 0, "p", TokenTrace([1]))
        sample.trace.append_model(TOKENIZER.encode("search"), [-0.5] * len(TOKENIZER.encode("search")))
        async with serving(answer) as url:
            args = SimpleNamespace(custom_config={"judge": {"url": url, "strictness": 0.75}})
            with use_rollout_context(RolloutContext(ScriptedEngine(TOKENIZER, []), TOKENIZER)):
                await module.check_services(args)
                return await reward(args, sample), sample

    return asyncio.run(run())


def test_the_judge_scores_and_remarks():
    reward, sample = judged(200)
    assert reward == {"reward": 0.25, "judged": 1.0}
    assert sample.notes == {"remark": "search"}


@pytest.mark.parametrize(("status", "error"), [(401, StopRunError), (503, FailSample)])
def test_a_judge_that_does_not_score(status: int, error: type[Exception]):
    with pytest.raises(error):
        judged(status)
    assert drain_step_metrics()["judge/busy"] == float(status == 503)


def test_a_judge_that_is_not_there():
    load_hook("my_judge.reward_func", "reward")
    args = SimpleNamespace(custom_config={"judge": {"url": "http://127.0.0.1:9/score"}})
    with pytest.raises(ValueError, match="expected the judge to answer"):
        asyncio.run(sys.modules["my_judge"].check_services(args))
