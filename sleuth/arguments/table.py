"""The resolved configuration as tables for the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group as Renderables
from rich.table import Table

from sleuth.arguments.args import Args
from sleuth.arguments.checks import flag
from sleuth.arguments.parser import NOT_FLAGS, groups_of
from sleuth.arguments.train_flags import ModelArgs
from sleuth.engine.option_names import option_flag
from sleuth.secrets import masked


def config_table(
    args: Args, *, only_changed: bool = False, default_sections: Mapping[str, Mapping[str, Any]] | None = None
) -> Renderables:
    """A table of flags and values for each group, and of the hooks' sections. Values that were given stand out.

    `only_changed` leaves out what is as by default; `default_sections` are the hooks' sections by default.
    """
    usual = default_sections or {} if only_changed else {}
    tables = []
    for group in groups_of(Args):
        names = [name for name in group.__annotations__ if name not in NOT_FLAGS]
        if only_changed:  # the model's shape is that of its config.json: a contradiction is an error
            names = [] if group is ModelArgs else [name for name in names if differs(args, name)]
        if names:
            tables.append(_group_table((group.__doc__ or "").split(". ")[0].split(" (")[0], names, args))
    if args.sglang_options:
        shown = masked(args.sglang_options)
        rows = [(option_flag(name), " ".join(words), "bold") for name, words in shown.items()]
        tables.append(_table("Options of SGLang's own", rows))
    for section, values in masked(args.custom_config).items():
        same = set(flattened(usual.get(section, {})))
        if rows := [(*row, "") for row in flattened(values) if row not in same]:
            tables.append(_table(f"Settings of the hooks: {section}", rows))
    return Renderables(*tables)


def differs(args: Args, name: str) -> bool:
    """Whether a flag has another value than its default, which may be computed from the flags before it."""
    field = type(args).model_fields[name]
    return bool(getattr(args, name) != field.get_default(call_default_factory=True, validated_data=dict(args)))


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs between two configurations, as `Args.to_yaml` writes them: `--lr 1e-06 -> 2e-06` and the like."""
    old, new = dict(flattened(before)), dict(flattened(after))
    return [
        f"{flag(name) if name in Args.model_fields else name} {old.get(name, '-')} -> {new.get(name, '-')}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name, "-") != new.get(name, "-") and name != "run_dir"
    ]


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
