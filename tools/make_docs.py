"""Writes the pages of docs/ that are tables of what the code says: metrics.md and arguments.md.

python tools/make_docs.py            writes them
python tools/make_docs.py --check    ends with status 1 if one is not current
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from pydantic.fields import FieldInfo
from rich.console import Console

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sleuth.arguments import Args
from sleuth.arguments.checks import flag
from sleuth.arguments.parser import NOT_FLAGS, groups_of
from sleuth.metrics import alarms
from sleuth.metrics.catalog import CATALOG, Metric
from sleuth.sample import StopReason

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "This page is made by `python tools/make_docs.py`; change the code, then run it."


def metrics_page() -> str:
    """docs/metrics.md from `sleuth.metrics.catalog`."""
    parts = [
        "# Metrics",
        NOTE,
        "Every metric goes to `metrics.jsonl` (one line a step), to TensorBoard with `--use-tensorboard` and to W&B "
        "with `--use-wandb`, under the same name. Step 0 is the evaluation before training; training steps count from "
        "1. `<...>` stands for a word of the run: an evaluated set and its temperature (`demo/greedy`, `demo/t1.0`), a "
        "component of the reward hook. A number that nothing reported is absent, not 0.",
    ]
    for title, metrics in CATALOG.items():
        rows = [(f"`{metric.name}`", metric.unit or "-", _meaning(metric)) for metric in metrics]
        parts += [f"## {title}", _table(("metric", "unit", "meaning"), rows)]
    reasons = [(f"`{reason}`", text) for reason, text in member_docstrings(StopReason).items()]
    parts += ["## Why a trajectory ends", _table(("`rollout/stop/<reason>`", "meaning"), reasons)]
    return "\n\n".join([*parts, *_alarms()]) + "\n"


def _meaning(metric: Metric) -> str:
    return f"{metric.meaning}; also logged as `{metric.alias}`" if metric.alias else metric.meaning


def _alarms() -> list[str]:
    """The section on alarms, from `sleuth.metrics.alarms`."""
    text = (
        "A run logs a warning line when one of these begins; none is raised for a single step. Means over "
        f"{alarms.WINDOW} steps are compared with those before (reward and exact match: two halves of "
        f"{2 * alarms.LONG} steps). The defaults stand at the top of `sleuth/metrics/alarms.py`. Signs in a single "
        "step (a constant reward, all groups without signal, labels without an answer, repeated prompts) are told at "
        "once."
    )
    raised = {
        "reward without exact match": f"rise of the reward {alarms.REWARD_RISE:g}, of exact match below "
        f"{alarms.EM_SHARE:.0%} of that",
        "format collapse": f"{alarms.FORMAT_FALL:g} below its best",
        "entropy collapse": f"below {alarms.ENTROPY_SHARE:.0%} of its first value and {alarms.ENTROPY_NATS:g} nats",
        "search failing": f"{alarms.SEARCH_FALL:g} below its best",
        "log-probability difference": f"{alarms.LOGPROB_FACTOR:g} times its lowest value, and "
        f"{alarms.LOGPROB_NATS:g} nats",
        "length at limit": f"{alarms.AT_LIMIT:.0%} of the responses",
    }
    rows = [(name, (alarm.__doc__ or "").strip(), raised[name]) for name, alarm in alarms.ALARMS.items()]
    return ["## Alarms", text, _table(("alarm", "meaning", "raised at"), rows)]


def member_docstrings(members: type[StrEnum]) -> dict[str, str]:
    """Each member's value and the string under it, which Python itself does not keep."""
    definition = ast.parse(inspect.getsource(members)).body[0]
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for node, following in pairwise(definition.body):
        match node, following:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                texts[members[name].value] = text
    return texts


def arguments_page() -> str:
    """docs/arguments.md from the groups of `Args`."""
    parts = [
        "# Arguments of train.py",
        NOTE,
        "Every flag may also stand in a YAML file named by `--custom-config-path` (with `_` or `-`); the command line "
        "wins. Defaults that are computed stand in brackets in the description. Booleans can be switched off with "
        "`--no-<name>`. The resolved configuration is saved in the run's folder as `config.yaml`.",
    ]
    for group in groups_of(Args):
        names = [name for name in group.__annotations__ if name in Args.model_fields and name not in NOT_FLAGS]
        rows = [
            (f"`{flag(name)}`", _default(Args.model_fields[name]), _text(Args.model_fields[name])) for name in names
        ]
        if rows:
            parts += [f"## {(group.__doc__ or group.__name__).strip()}", _table(("flag", "default", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None or field.default is None:
        return "-"
    value = field.default
    text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    return f"`{text}`"


def _text(field: FieldInfo) -> str:
    return (field.description or "").replace("<", "&lt;")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


PAGES = {"metrics.md": metrics_page, "arguments.md": arguments_page}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say which pages are not current")
    options = parser.parse_args(argv)
    console = Console(soft_wrap=True)
    stale = [name for name, page in PAGES.items() if not _is_current(DOCS / name, page())]
    if options.check:
        for name in stale:
            console.print(f"docs/{name} is not current: run python tools/make_docs.py")
        return 1 if stale else 0
    for name in stale:
        (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
        console.print(f"wrote docs/{name}")
    return 0


def _is_current(path: Path, page: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == page


if __name__ == "__main__":
    sys.exit(main())
