"""The algorithms stay usable without Ray, Megatron, an engine or a tokenizer."""

import ast
import sys
from pathlib import Path

import pytest

import sleuth.algo

MODULES = sorted(Path(sleuth.algo.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_only_torch_and_the_standard_library(path):
    imported = set()
    for node in ast.parse(path.read_text()).body:  # the top level: what `if TYPE_CHECKING` holds is not run
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    outside = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}
    assert all(name == "torch" or name.startswith("sleuth.algo.") for name in outside), outside
