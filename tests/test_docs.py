"""What the documents say exists, exists; the commands they show are accepted."""

import re
import shlex
from pathlib import Path

import pytest

from sleuth.arguments import parse_args

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))


def shell_blocks(page: Path) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's shell blocks, as words, without comments."""
    lines = [line for block in shell_blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}, which is not there"
        if heading:
            assert heading in headings_of(linked), f"{page.name} links to {target}, which is no heading"


def headings_of(page):
    """The headings, as links name them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_are_shown_exist(page):
    for words in commands(page):
        for word in words:
            if re.fullmatch(r"[\w./-]+\.(py|sh)", word) and not word.startswith("your"):
                assert (ROOT / word).is_file(), f"{page.name} runs {word}, which is not there"


def test_complete_training_commands_of_the_readme_are_accepted():
    shown = [words[2:] for words in commands(ROOT / "README.md") if words[:2] == ["python", "train.py"]]
    complete = [words for words in shown if "..." not in words]
    assert complete
    for words in complete:
        args = parse_args(words)
        assert args.samples_per_step % args.global_batch_size == 0


def test_the_house_of_the_readme_exists():
    layout = (ROOT / "README.md").read_text(encoding="utf-8").split("## Layout")[1].split("\n\n[")[0]
    prefix = ""
    for line in filter(str.strip, layout.splitlines()):
        indent = len(line) - len(line.lstrip())
        names = re.split(r"\s{2,}", line.strip())[0] if not line.strip().endswith("/") else line.strip()
        prefix = "sleuth" if indent > 4 else ""
        for name in re.split(r",?\s+", names):
            assert (ROOT / prefix / name).exists(), f"the layout names {prefix}/{name}, which is not there"
