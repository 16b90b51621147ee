"""Hooks: "module.function" -> a callable whose shape was checked before anything expensive starts."""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import os
import pkgutil
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from sleuth.compat.finder import install_stand_ins

logger = logging.getLogger(__name__)

HookKind = Literal["generate", "reward", "tis", "filter", "search"]
SLOW_IMPORT_SECONDS = 10.0
THREAD_SECONDS = 1.0
"""How long a thread that an import started may go on after the process wants to end."""


@dataclass(frozen=True)
class _Contract:
    flag: str
    signature: str
    is_async: bool
    positional: int
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_CONTRACTS: dict[HookKind, _Contract] = {
    "generate": _Contract(
        "--custom-generate-function-path",
        "async def generate(args, sample, sampling_params, evaluation=False) -> Sample   # `evaluation` optional",
        is_async=True,
        positional=3,
        optional=("evaluation",),
    ),
    "reward": _Contract(
        "--custom-rm-path",
        "async def reward_func(args, sample, **kwargs) -> float | dict[str, float]",
        is_async=True,
        positional=2,
    ),
    "tis": _Contract(
        "--custom-tis-function-path",
        "def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, "
        "**kwargs) -> (pg_loss, loss_masks, metrics)",
        is_async=False,
        positional=1,
        keywords=(
            "pg_loss",
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "total_lengths",
            "response_lengths",
        ),
    ),
    "filter": _Contract(
        "--dynamic-sampling-filter-path",
        "def keep(args, samples) -> bool",
        is_async=False,
        positional=2,
    ),
    "search": _Contract(
        "search_backend",
        "async def search(query, topk) -> list of passages",
        is_async=True,
        positional=2,
    ),
}


def load_hook(path: str | None, kind: HookKind) -> Callable[..., Any]:
    """Import the function at `path` ("module.function") and check that it can be called as a hook of its kind.

    Raises ValueError, which says what was looked for, where, and what is there instead.
    """
    contract = _CONTRACTS[kind]
    module_name, _, name = (path or "").rpartition(".")
    if not path or not module_name:
        raise ValueError(
            f"{contract.flag}: expected module.function, found {path!r}; name the module before the function"
        )
    module = _import(module_name, path, contract)
    hook = getattr(module, name, None)
    if not callable(hook):
        raise ValueError(f"{contract.flag} {path}: {_what_is_there(module, name, hook)}")
    _check_shape(hook, path, contract)
    return hook


def named_hooks(args: Any) -> dict[HookKind, str]:
    """The hook paths that the flags in `args` (an object or a mapping) name, by kind of hook."""
    get = args.get if isinstance(args, dict) else lambda name: getattr(args, name, None)
    paths: dict[HookKind, str | None] = {
        "generate": get("custom_generate_function_path"),
        "reward": get("custom_rm_path") if get("loss_type") != "sft" else None,
        "tis": get("custom_tis_function_path"),
        "filter": get("dynamic_sampling_filter_path"),
    }
    return {kind: path for kind, path in paths.items() if path}


def flags_left_out(args: Any) -> list[str]:
    """The flags that name hooks which have settings and are not given in `args`."""
    named = named_hooks(args)
    return [_CONTRACTS[kind].flag for kind in ("generate", "reward", "tis") if kind not in named]


def hook_modules(args: Any) -> list[ModuleType]:
    """The modules of the hooks that the flags name, each once; also those that define the functions, if they differ.

    Raises ValueError as `load_hook` does.
    """
    modules: dict[str, ModuleType] = {}
    for kind, path in named_hooks(args).items():
        hook = load_hook(path, kind)
        for name in (path.rpartition(".")[0], getattr(hook, "__module__", None)):
            if name in sys.modules:
                modules.setdefault(name, sys.modules[name])
    return list(modules.values())


def check_hooks(args: Any) -> None:
    """Import every hook that the flags of `args` name, and let their modules check the settings.

    A hook's module may have a function `check_args(args)`, which raises ValueError if the hook's own settings are
    wrong. Raises ValueError as `load_hook` does.
    """
    for module in hook_modules(args):
        if callable(check := getattr(module, "check_args", None)):
            check(args)


def describe_hooks(args: Any) -> list[tuple[str, str]]:
    """For each hook that the flags name: its kind, and its path and file."""
    return [
        (kind, f"{path} ({getattr(sys.modules[path.rpartition('.')[0]], '__file__', 'built in')})")
        for kind, path in named_hooks(args).items()
    ]


def accepts_evaluation(generate: Callable[..., Any]) -> bool:
    """Whether a generate hook takes the optional `evaluation` argument."""
    return _accepts(inspect.signature(generate), "evaluation")


def _accepts(signature: inspect.Signature, name: str) -> bool:
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _import(module_name: str, path: str, contract: _Contract) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # a hook may lie in the folder where the command was typed
    install_stand_ins()
    threads = set(threading.enumerate())
    try:
        with _tell_if_slow(module_name):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise ValueError(
                f"{contract.flag} {path}: module {module_name} needs {missing}, which is not installed"
            ) from error
        raise ValueError(f"{contract.flag} {path}: {_where_it_was_sought(missing)}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{contract.flag} {path}: module {module_name} was found but failed to import: "
            f"{type(error).__name__}: {error}"
        ) from error
    started = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    if started:
        _end_in_spite_of(started)
        raise ValueError(
            f"{contract.flag} {path}: importing {module_name} starts the thread {', '.join(t.name for t in started)}, "
            "which would keep every process of the run from ending; start it in the hook, or as a daemon"
        )
    return module


def _end_in_spite_of(threads: Sequence[threading.Thread]) -> None:
    """Python waits at its end for threads that are no daemons, maybe for ever: end this process all the same."""

    def end() -> None:
        threading.main_thread().join()
        for thread in threads:
            thread.join(THREAD_SECONDS)
        if any(thread.is_alive() for thread in threads):
            sys.stdout.flush()
            os._exit(1)

    threading.Thread(target=end, daemon=True).start()


@contextmanager
def _tell_if_slow(module_name: str) -> Iterator[None]:
    """Log a line if the import in the block takes long; without it the run would seem to hang."""
    message = f"importing the hook module {module_name} takes more than {SLOW_IMPORT_SECONDS:.0f} s"
    timer = threading.Timer(SLOW_IMPORT_SECONDS, logger.warning, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _where_it_was_sought(module_name: str) -> str:
    parent, _, leaf = module_name.rpartition(".")
    folders = list(importlib.import_module(parent).__path__) if parent else [p or "." for p in _search_path()]
    names = sorted({info for folder in folders for info in _modules_in(folder)})
    return (
        f"looked for module {module_name} in {', '.join(folders)}, found none; {_nearest(leaf, names)}"
        "put its folder on PYTHONPATH or correct the path"
    )


def _search_path() -> list[str]:
    """The folders of sys.path that may hold a user's hooks, without the standard library and installed packages."""
    libraries = (sysconfig.get_path("stdlib"), sys.base_prefix, sysconfig.get_path("purelib"))
    return list(dict.fromkeys(entry for entry in sys.path if not entry.startswith(libraries)))


def _modules_in(folder: str) -> list[str]:
    return [info.name for info in pkgutil.iter_modules([folder])]


def _what_is_there(module: ModuleType, name: str, found: Any) -> str:
    where = getattr(module, "__file__", None) or "a built-in module"
    if found is not None:
        return f"expected a function, found {type(found).__name__} {name} in {where}"
    names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    own = [key for key in names if getattr(vars(module)[key], "__module__", None) == module.__name__]
    return (
        f"looked for {name} in {where}, found none; {_nearest(name, names)}it defines {', '.join(own) or 'no function'}"
    )


def _nearest(name: str, names: list[str]) -> str:
    """`did you mean X? `, or nothing."""
    match = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {match[0]}? " if match else ""


def _check_shape(hook: Callable[..., Any], path: str, contract: _Contract) -> None:
    call = hook if inspect.isroutine(hook) else type(hook).__call__
    is_async = inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(call)
    if is_async is not contract.is_async:
        wanted, found = ("async def", "def") if contract.is_async else ("def", "async def")
        raise ValueError(
            f"{contract.flag} {path}: expected `{wanted}`, found `{found}`; its shape must be `{contract.signature}`"
        )
    signature = inspect.signature(hook)
    keywords = [*contract.keywords, *(name for name in contract.optional if _accepts(signature, name))]
    try:
        signature.bind(*range(contract.positional), **dict.fromkeys(keywords))
    except TypeError as error:
        raise ValueError(
            f"{contract.flag} {path}: expected `{contract.signature}`, found `{path}{signature}` ({error})"
        ) from None
