"""Loading hooks by dotted path, and what is said when one is not as it should be."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.hooks import HookKind, accepts_evaluation, check_hooks, describe_hooks, load_hook, loader

ROOT = Path(__file__).resolve().parents[2]

HOOKS = """
from functools import partial

LIMIT = 3

async def generate(args, sample, sampling_params): ...
async def generate_eval(args, sample, sampling_params, evaluation): ...
async def generate_short(args, sample): ...
async def generate_more(args, sample, sampling_params, *, extra): ...
async def reward_func(args, sample, **kwargs): ...
def reward_sync(args, sample, **kwargs): ...
def tis(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
): ...
def tis_strict(args, *, pg_loss): ...
def keep(args, samples): ...

class Reward:
    async def __call__(self, args, sample, **kwargs): ...

reward_object = Reward()
reward_partial = partial(reward_func)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "some_hooks.py").write_text(HOOKS)
    (tmp_path / "broken_hooks.py").write_text("raise RuntimeError('no luck')")
    (tmp_path / "needy_hooks.py").write_text("import a_package_nobody_has")
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text("async def reward_func(args, sample): ...")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("some_hooks.generate", "generate"),
        ("some_hooks.generate_eval", "generate"),
        ("some_hooks.reward_func", "reward"),
        ("some_hooks.reward_object", "reward"),
        ("some_hooks.reward_partial", "reward"),
        ("some_package.rewards.reward_func", "reward"),
        ("some_hooks.tis", "tis"),
        ("some_hooks.keep", "filter"),
    ],
)
def test_hooks_of_the_right_shape_are_loaded(path: str, kind: HookKind):
    assert callable(load_hook(path, kind))


@pytest.mark.parametrize(
    ("path", "kind", "parts"),
    [
        (
            "some_hooks.genrate",
            "generate",
            ["--custom-generate-function-path", "looked for genrate in", "some_hooks.py"],
        ),
        ("some_hooks.genrate", "generate", ["did you mean generate?", "it defines", "reward_func"]),
        (
            "some_hook.generate",
            "generate",
            ["looked for module some_hook in", "did you mean some_hooks?", "PYTHONPATH"],
        ),
        ("some_package.reward.f", "reward", ["looked for module some_package.reward in", "did you mean rewards?"]),
        ("generate", "generate", ["expected module.function, found 'generate'"]),
        ("", "reward", ["expected module.function, found ''"]),
        (None, "reward", ["--custom-rm-path: expected module.function, found None"]),
        ("some_hooks.LIMIT", "reward", ["expected a function, found int LIMIT"]),
        ("some_hooks.reward_sync", "reward", ["expected `async def`, found `def`"]),
        ("some_hooks.reward_func", "filter", ["--dynamic-sampling-filter-path", "expected `def`, found `async def`"]),
        ("some_hooks.generate_short", "generate", ["found `some_hooks.generate_short(args, sample)`"]),
        ("some_hooks.generate_more", "generate", ["missing a required", "extra"]),
        ("some_hooks.tis_strict", "tis", ["--custom-tis-function-path", "unexpected keyword argument"]),
        ("broken_hooks.f", "reward", ["failed to import", "RuntimeError: no luck"]),
        ("needy_hooks.f", "reward", ["needs a_package_nobody_has, which is not installed"]),
    ],
)
def test_what_is_wrong_with_a_hook_is_said(path: str | None, kind: HookKind, parts: list[str]):
    with pytest.raises(ValueError, match=r"--custom|--dynamic") as caught:
        load_hook(path, kind)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_whether_a_generate_hook_wants_to_know_of_evaluation():
    assert accepts_evaluation(load_hook("some_hooks.generate_eval", "generate"))
    assert not accepts_evaluation(load_hook("some_hooks.generate", "generate"))
    assert inspect.iscoroutinefunction(load_hook("some_hooks.generate", "generate"))


def flags(**paths: str) -> Any:
    names = (
        "custom_generate_function_path",
        "custom_rm_path",
        "custom_tis_function_path",
        "dynamic_sampling_filter_path",
    )
    return SimpleNamespace(**{**dict.fromkeys(names), "loss_type": "policy", **paths})


def test_every_hook_of_a_run_is_checked_the_importance_sampling_too():
    args = flags(custom_rm_path="some_hooks.reward_func", custom_tis_function_path="some_hooks.tis")
    check_hooks(args)
    found = [(kind, path.rpartition(" (")[0]) for kind, path in describe_hooks(args)]
    assert found == [("reward", "some_hooks.reward_func"), ("tis", "some_hooks.tis")]
    with pytest.raises(ValueError, match=r"--custom-tis-function-path some_hooks\.tis_strict"):
        check_hooks(flags(custom_tis_function_path="some_hooks.tis_strict"))


def test_a_module_of_hooks_checks_its_own_settings():
    path = "generate_with_search.generate"
    wrong = {"search_r1": {"search_backend": "bing"}}
    with pytest.raises(ValueError, match="no search backend is named 'bing'; expected local, google"):
        check_hooks(flags(custom_generate_function_path=path, custom_config=wrong))


def test_a_module_that_imports_slowly_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(loader, "SLOW_IMPORT_SECONDS", 0.05)
    (folder / "slow_hooks.py").write_text("import time\ntime.sleep(0.3)\nasync def reward_func(args, sample): ...\n")
    with caplog.at_level(logging.WARNING):
        load_hook("slow_hooks.reward_func", "reward")
        load_hook("some_hooks.reward_func", "reward")
    assert [r.message for r in caplog.records] == ["importing the hook module slow_hooks takes more than 0 s"]


def test_a_module_that_ends_the_program_does_not(folder: Path):
    (folder / "leaving_hooks.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ValueError, match="module leaving_hooks was found but failed to import: SystemExit: 3"):
        load_hook("leaving_hooks.f", "reward")


THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=({seconds},), name="warmer", daemon={daemon}).start()
async def reward_func(args, sample): ...
"""


def test_a_module_may_start_daemons_only(folder: Path):
    (folder / "daemon_hooks.py").write_text(THREAD.format(seconds=30, daemon=True))
    load_hook("daemon_hooks.reward_func", "reward")
    (folder / "thread_hooks.py").write_text(THREAD.format(seconds=0.5, daemon=False))
    with pytest.raises(ValueError, match="importing thread_hooks starts the thread warmer, which would keep every"):
        load_hook("thread_hooks.reward_func", "reward")


def test_a_thread_that_goes_on_does_not_keep_the_command_that_refused_it(folder: Path):
    (folder / "thread_hooks.py").write_text(THREAD.format(seconds=600, daemon=False))
    start = time.monotonic()
    flags = ["--custom-rm-path", "thread_hooks.reward_func", "--prompt-data", "x.parquet", "--scripted", "x.yaml"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools/try_hook.py", *flags], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert "error: --custom-rm-path thread_hooks.reward_func: importing thread_hooks starts the thread" in done.stderr
    assert done.returncode != 0
    assert time.monotonic() - start < 150


def test_a_hook_is_found_in_the_folder_where_the_command_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "typed_here").mkdir()
    (tmp_path / "typed_here/local_hooks.py").write_text("async def reward_func(args, sample): ...\n")
    monkeypatch.chdir(tmp_path / "typed_here")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_hook("local_hooks.reward_func", "reward")
