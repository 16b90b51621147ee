"""The resolved configuration as tables for the console."""

from __future__ import annotations

from typing import Any

from rich.console import Group as Renderables
from rich.table import Table

from sleuth.arguments.args import Args
from sleuth.arguments.checks import flag
from sleuth.arguments.parser import groups_of


def config_table(args: Args, *, only_changed: bool = False) -> Renderables:
    """One table a group: flag and value; values that were given stand out. `only_changed` shows only those."""
    tables = []
    for group in groups_of(Args):
        names = [name for name in group.__annotations__ if not only_changed or name in args.model_fields_set]
        if names:
            tables.append(_group_table((group.__doc__ or "").split(". ")[0].split(" (")[0], names, args))
    return Renderables(*tables)


def _group_table(title: str, names: list[str], args: Args) -> Table:
    table = Table(title=title.strip(), title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(no_wrap=True, min_width=40)
    table.add_column(overflow="fold")
    for name in names:
        style = "bold" if name in args.model_fields_set else "dim"
        table.add_row(flag(name), _text(getattr(args, name)), style=style)
    return table


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
