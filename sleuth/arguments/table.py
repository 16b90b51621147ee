"""The resolved configuration as tables for the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group as Renderables
from rich.table import Table

from sleuth.arguments.args import Args
from sleuth.arguments.checks import flag
from sleuth.arguments.parser import NOT_FLAGS, groups_of
from sleuth.engine.option_names import option_flag
from sleuth.secrets import masked


def config_table(args: Args, *, only_changed: bool = False) -> Renderables:
    """A table of flags and values for each group. Values that were given stand out; `only_changed` shows only these."""
    tables = []
    for group in groups_of(Args):
        names = [name for name in group.__annotations__ if name not in NOT_FLAGS]
        names = [name for name in names if not only_changed or name in args.model_fields_set]
        if names:
            tables.append(_group_table((group.__doc__ or "").split(". ")[0].split(" (")[0], names, args))
    if args.sglang_options:
        shown = masked(args.sglang_options)
        rows = [(option_flag(name), " ".join(words), "bold") for name, words in shown.items()]
        tables.append(_table("Options of SGLang's own", rows))
    for section, values in masked(args.custom_config).items():
        tables.append(_table(f"Settings of the hooks: {section}", [(*row, "") for row in flattened(values)]))
    return Renderables(*tables)


def flattened(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """The entries of nested mappings as pairs of a dotted key and a text, such as `("local.proxy", "-")`."""
    if not isinstance(values, Mapping):
        return [(prefix, _text(values))]
    return [row for key, value in values.items() for row in flattened(value, f"{prefix}.{key}" if prefix else str(key))]


def _group_table(title: str, names: list[str], args: Args) -> Table:
    given = args.model_fields_set
    return _table(
        title, [(flag(name), _text(masked(getattr(args, name))), "bold" if name in given else "dim") for name in names]
    )


def _table(title: str, rows: Iterable[tuple[str, str, str]]) -> Table:
    """A table of rows (name, value, style)."""
    table = Table(title=title.strip(), title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(no_wrap=True, min_width=40)
    table.add_column(overflow="fold")
    for name, value, style in rows:
        table.add_row(name, value, style=style)
    return table


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
