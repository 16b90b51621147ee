"""Every tool can be started as `python tools/<name>.py`, where Python puts tools/ and not the project on its path."""

from pathlib import Path

import pytest

TOOLS = [
    path
    for path in sorted((Path(__file__).resolve().parents[2] / "tools").glob("*.py"))
    if "__main__" in path.read_text("utf-8")
]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.name)
def test_a_tool_makes_the_project_importable_before_it_imports_from_it(tool: Path):
    text = tool.read_text("utf-8")
    first = min(text.index(f"\nfrom {package}") for package in ("sleuth", "local_dense") if f"\nfrom {package}" in text)
    assert 0 < text.find("sys.path.insert(0, str(Path(__file__).resolve().parent.parent))") < first
