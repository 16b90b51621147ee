"""What pyproject.toml declares: that it is complete, agrees with the pinned set, and makes packages that are whole."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sleuth.arguments import ArgumentsError, check_files, parse_args
from sleuth.engine import launch

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
MODULES: list[str] = PROJECT["tool"]["setuptools"]["py-modules"]
PROGRAMS = {"train"}
"""Files at the top that are run, not imported."""
NOT_ON_CPU = {"swanlab", "trackio", "wandb"}
"""What the pinned environment leaves out beside `gpu-engine`."""


FLAGS = [
    "--hf-checkpoint",
    "x",
    "--prompt-data",
    "x.jsonl",
    "--colocate",
    "--custom-rm-path",
    "generate_with_search.reward_func",
]


def requirements(lines: list[str]) -> dict[str, Requirement]:
    found = map(Requirement, lines)
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def lines_of(name: str) -> list[str]:
    lines = (line.partition(" #")[0].strip() for line in (ROOT / "scripts" / name).read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


CORE = requirements(PROJECT["project"]["dependencies"])
DECLARED = {**CORE, **requirements([line for lines in EXTRAS.values() for line in lines])}
LOWER_ON_GPUS = {"numpy"}
"""SGLang's own requirements want an older one than what runs on CPUs: its bound is the version in the GPU locks."""
PINNED = {
    name: str(pin.specifier).removeprefix("==") for name, pin in requirements(lines_of("constraints-cpu.txt")).items()
}


def test_the_pinned_environment_is_what_the_project_declares() -> None:
    without_deps = set(requirements(lines_of("requirements-cpu-nodeps.txt")))
    gpu = set(requirements(EXTRAS["gpu-engine"]))
    listed = requirements(lines_of("requirements-cpu.txt"))
    assert set(listed) == set(DECLARED) - gpu - NOT_ON_CPU
    assert gpu <= without_deps
    for name, requirement in listed.items():
        assert requirement.specifier.contains(PINNED[name]), name


@pytest.mark.parametrize("name", sorted(set(DECLARED) - NOT_ON_CPU))
def test_each_lower_bound_is_the_version_that_was_run(name: str) -> None:
    (lower,) = [part.version for part in DECLARED[name].specifier if part.operator == ">="]
    locks = [(ROOT / f"scripts/locks/gpu-{python}.txt").read_text() for python in ("3.11", "3.12")]
    if name in LOWER_ON_GPUS:
        assert all(f"\n{name}=={lower} " in lock for lock in locks)
    else:
        assert lower == PINNED[name]
    assert DECLARED[name].specifier.contains(PINNED[name])


def test_extras_do_not_contradict_each_other() -> None:
    for lines in EXTRAS.values():
        for name, requirement in requirements(lines).items():
            assert requirement.specifier == DECLARED[name].specifier


def imports_of(path: Path) -> set[str]:
    """The first names of the modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


SHIPPED = {
    "": [path for path in ROOT.glob("sleuth/**/*.py") if "cpu_stubs" not in path.parts]
    + [ROOT / f"{module}.py" for module in MODULES],
    "retriever": list(ROOT.glob("local_dense_retriever/*.py")),
}
OPTIONAL = {"sglang", "sglang_router", "swanlab", "trackio", "wandb", "pyserini"}
"""Imported where a flag or the machine asks for it, with an error that says so."""


@pytest.mark.parametrize("extra", SHIPPED)
def test_all_that_is_imported_is_declared(extra: str) -> None:
    declared = {*CORE, *(requirements(EXTRAS[extra]) if extra else ())}
    own = {"sleuth", "local_dense_retriever", *MODULES}
    imported = set().union(*map(imports_of, SHIPPED[extra])) - set(sys.stdlib_module_names) - own - OPTIONAL
    distributions = importlib.metadata.packages_distributions()
    missing = [
        module for module in imported if not {canonicalize_name(name) for name in distributions[module]} & set(declared)
    ]
    assert missing == []


def test_every_file_at_the_top_is_a_module_or_a_program() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == {*MODULES, *PROGRAMS}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    files = ["pyproject.toml", "README.md", "LICENSE", *(f"{module}.py" for module in MODULES)]
    for name in files:  # a copy: a build leaves files beside its source
        shutil.copy(ROOT / name, folder)
    for package in ("sleuth", "local_dense_retriever"):
        shutil.copytree(ROOT / package, folder / package)
    (folder / "sleuth/engine/cpu_stubs/triton/__pycache__").mkdir(exist_ok=True)
    (folder / "sleuth/engine/cpu_stubs/triton/__pycache__/left.pyc").touch()
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "made", "."]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (made,) = (folder / "made").glob("*.whl")
    return made


def test_a_wheel_holds_all_that_is_imported(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    packages = [path for name in ("sleuth", "local_dense_retriever") for path in (ROOT / name).rglob("*")]
    files = {str(path.relative_to(ROOT)) for path in packages if path.is_file() and "__pycache__" not in path.parts}
    assert held == files | {f"{module}.py" for module in MODULES}
    assert "sleuth/engine/cpu_stubs/sgl_kernel/__init__.py" in held
    assert {"sleuth/py.typed", "local_dense_retriever/py.typed"} <= held


def test_an_installed_wheel_can_be_imported_elsewhere(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    names = ["sleuth.sample", "sleuth.engine.server", "local_dense_retriever.app", *MODULES]
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n" + "".join(
        f"import {name}; assert {name.split('.')[0]}.__file__.startswith(sys.path[0])\n" for name in names
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_machine_without_an_engine_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else find_spec(name))
    with pytest.raises(
        ArgumentsError, match=r"on a CPU run `bash scripts/setup_cpu\.sh`, for GPUs `bash scripts/setup_gpu\.sh`"
    ):
        check_files(parse_args(FLAGS))
    monkeypatch.setattr(launch.os, "getpgrp", launch.os.getpid)
    monkeypatch.setattr(launch, "watch_owner", lambda *_: None)
    with pytest.raises(SystemExit, match="expected the package sglang, found none"):
        launch.main(["1", "/nowhere"])
