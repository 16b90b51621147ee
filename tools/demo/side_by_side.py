"""A few held-out questions before and after training, side by side: whole trajectories of the greedy evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sleuth.labels import as_text
from sleuth.metrics.trajectories import read_trajectories

KINDS = (("demo_birth_year", "demo_death_year"), ("demo_creator", "demo_work_year"), ("demo_two_hop",))
"""One question is shown of each: the first that was logged, whatever became of it."""
COLOURS = {"model": "green", "observation": "blue", "correction": "yellow"}
LONGEST = 110
"""Characters of a segment that are shown."""
ROLE = re.compile(r"<\|im_(?:start|end)\|>(?:user|assistant|tool)?")


def side_by_side(run_dir: Path) -> list[Panel]:
    """A panel a question; none if the run has no trajectories of a greedy evaluation before and after training."""
    files = sorted((run_dir / "trajectories").glob("eval_*_greedy.jsonl"))
    if len(files) < 2:
        return []
    before, after = (_by_question(files[i]) for i in (0, -1))
    panels = []
    for kinds in KINDS:
        shared = (key for key, record in before.items() if key in after and record["data_source"] in kinds)
        if (key := next(shared, None)) is not None:
            panels.append(_panel(before[key], after[key]))
    return panels


def _by_question(path: Path) -> dict[tuple[Any, Any], dict[str, Any]]:
    return {(record["file"], record["row"]): record for record in read_trajectories(path)}


def _panel(before: dict[str, Any], after: dict[str, Any]) -> Panel:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(Text("before", style="bold"), Text("after", style="bold"))
    table.add_row(_story(before), _story(after))
    turn = before["prompt"].rpartition("<|im_start|>user")[2]  # a system turn may name tools before it
    question = ROLE.sub("", turn).strip().rpartition("Question: ")[2]
    asked = Text(f"{question} ({as_text(before['label'])})", style="bold")  # no title: those are cut to one line
    return Panel(Group(asked, table))


def _story(record: dict[str, Any]) -> Group:
    parts = [
        Text(_shortened(s["text"]), style=COLOURS.get(s["source"], "white"), overflow="fold")
        for s in record["segments"]
    ]
    right = bool(record["reward_components"].get("exact_match"))
    return Group(*parts, Text("right" if right else "wrong", style="bold green" if right else "bold red"))


def _shortened(text: str) -> str:
    plain = " ".join(ROLE.sub("", text).split())
    return plain if len(plain) <= LONGEST else plain[: LONGEST - 3] + "..."
