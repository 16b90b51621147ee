"""Every tool can be started as `python tools/<name>.py`, where Python puts its folder, not the project, on the path."""

from pathlib import Path

import pytest

TOOLS = [
    path
    for path in sorted((Path(__file__).resolve().parents[2] / "tools").rglob("*.py"))
    if "__main__" in path.read_text("utf-8") and path.parent.name != "gpu_checks"  # which are started as modules
]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.name)
def test_a_tool_makes_the_project_importable_before_it_imports_from_it(tool: Path):
    text = tool.read_text("utf-8")
    packages = ("sleuth", "local_dense", "tools", "generate_with", "qa_em", "benchmarks", "tests")
    first = min((text.index(f"\nfrom {package}") for package in packages if f"\nfrom {package}" in text), default=0)
    if first == 0:
        return
    root = "parent.parent" if tool.parent.name == "tools" else "parents[2]"
    assert 0 < text.find(f"sys.path.insert(0, str(Path(__file__).resolve().{root}))") < first
