"""Which module may import which: there are no circles, and the hooks at the top stay at the top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sleuth", "local_dense_retriever", "tools", "benchmarks", "examples")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
MODULES = {module_name(path): path for path in FILES if "cpu_stubs" not in path.parts}


def imported(module: str) -> Iterator[str]:
    """The project's modules that a module names, also within functions and for types alone."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [member if member in MODULES else node.module for member in members]
        else:
            continue
        yield from (name for name in names if name in MODULES and name != module)


GRAPH = {module: set(imported(module)) for module in MODULES}


def test_no_modules_import_each_other_in_a_circle():
    assert len(GRAPH) > 100
    list(TopologicalSorter(GRAPH).static_order())  # CycleError, which names them


def test_the_framework_imports_neither_hooks_nor_scripts():
    below = ("sleuth", "local_dense_retriever")
    upward = [
        f"{module} imports {name}"
        for module, names in GRAPH.items()
        for name in names
        if module.partition(".")[0] in below and name.partition(".")[0] not in below
    ]
    assert upward == []


def test_engines_know_nothing_of_the_flags():
    upward = [
        f"{module} imports {name}"
        for module, names in GRAPH.items()
        for name in names
        if module.startswith("sleuth.engine.") and name.startswith("sleuth.arguments")
    ]
    assert upward == []


def test_nothing_imports_the_loop():
    assert [module for module, names in GRAPH.items() if "train" in names] == []
