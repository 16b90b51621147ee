"""Every tool can be started as `python tools/<name>.py`, where Python puts its folder, not the project, on the path."""

from pathlib import Path

import pytest

TOOLS = [
    path
    for path in sorted((Path(__file__).resolve().parents[2] / "tools").rglob("*.py"))
    if "__main__" in path.read_text("utf-8")
]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.name)
def test_a_tool_makes_the_project_importable_before_it_imports_from_it(tool: Path):
    text = tool.read_text("utf-8")
    packages = ("sleuth", "local_dense", "tools")
    first = min(text.index(f"\nfrom {package}") for package in packages if f"\nfrom {package}" in text)
    root = "parents[2]" if tool.parent.name == "demo" else "parent.parent"
    assert 0 < text.find(f"sys.path.insert(0, str(Path(__file__).resolve().{root}))") < first
