"""Finds the hook's section to which each entry of a configuration file belongs that is not a flag.

`sleuth` knows no hook's keys: the modules that the hook flags name declare them (`sleuth.hooks.Settings`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sleuth.arguments.checks import flag
from sleuth.hooks.loader import flags_left_out, hook_modules
from sleuth.hooks.settings import FREE_SECTION, Settings, declared_settings, lookup, merged, nested, unknown_key
from sleuth.secrets import shown

MANY = 4
"""From so many unknown keys on, a file is taken for that of a hook that no flag names."""


class FileEntry(NamedTuple):
    """A top-level entry of a file: `key` as written, `name` with underscores."""

    path: str
    key: str
    name: str
    value: Any


def assign_sections(
    entries: Sequence[FileEntry],
    values: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    suggest: Callable[[str], str],
) -> tuple[dict[str, Any], list[str]]:
    """Returns `custom_config` by section with the flags that sections set, and the problems of the entries.

    `values`: the flags of files and command line; `given`: those of the command line alone, which outrank a section.
    `suggest` explains a key that neither a flag nor a hook knows.
    """
    classes: list[type[Settings]] = []
    if any(entry.name != FREE_SECTION for entry in entries):
        try:
            classes = declared_settings(hook_modules(dict(values)))
        except ValueError as error:
            return {}, [str(error)]
    sections: dict[str, Any] = {}
    unknown: dict[str, list[str]] = defaultdict(list)
    problems = list(_collect(entries, classes, sections, unknown))
    left_out = flags_left_out(dict(values))
    for path, keys in unknown.items():
        problems += [f"{path}: {sentence}" for sentence in _unknown_entries(keys, classes, suggest, left_out)]
    result: dict[str, Any] = {"custom_config": sections}
    for cls in classes:
        problems += _join_flags(cls, sections, values, given, result)
    return result, problems


def _collect(
    entries: Sequence[FileEntry],
    classes: Sequence[type[Settings]],
    sections: dict[str, Any],
    unknown: dict[str, list[str]],
) -> Iterator[str]:
    """Put each entry into its section, and those that have none into `unknown`; yields a sentence for each problem."""
    names = {cls.section for cls in classes} | {FREE_SECTION}
    flat = {key: cls.section for cls in classes if cls.flat for key in cls.model_fields}
    top: dict[tuple[str, str], Any] = {}
    for path, key, name, value in entries:
        if name in names:
            if value is not None and not isinstance(value, Mapping):
                yield f"{path}: expected a mapping under {key}:, found {shown(value, key)}"
                continue
            sections[name] = merged(sections.get(name, {}), value or {})  # null: all of its keys are commented out
        elif name in flat:
            top[flat[name], name] = value
        else:
            unknown[path].append(key)
    for (section, name), value in top.items():
        inside = sections.setdefault(section, {})
        if name in inside and inside[name] != value:
            both = f"{shown(value, name)} and under {section}: as {shown(inside[name], name)}"
            yield f"{name} is given at the top level as {both}; keep one"
        inside[name] = value


def _unknown_entries(
    unknown: Sequence[str], classes: Sequence[type[Settings]], suggest: Callable[[str], str], left_out: Sequence[str]
) -> Iterator[str]:
    """What is wrong with the unknown keys of one file: a sentence for each or, if there are many, one for all.

    `left_out`: the flags that could name their hook.
    """
    sections = [cls.section for cls in classes]
    if len(unknown) >= MANY:  # not a misspelt key: the file is of a hook that no flag names
        remedy = f"name their hook with {' or '.join(left_out)}, or leave them out" if left_out else "leave them out"
        expected = f"settings of the hooks that the flags name ({', '.join(sections) or 'these declare none'})"
        yield f"expected {expected}, found {', '.join(unknown)}; {remedy}"
        return
    declared = f"the hooks that the flags name declare {', '.join(sections)}" if sections else "no hook declares it"
    keys = [name for cls in classes if cls.flat for name in cls.model_fields]
    for key in unknown:
        near = unknown_key(key, [*sections, *keys])
        if "did you mean" in near:
            yield near
        else:
            where = "a hook's section needs the hook's flag; keys that nothing checks stand under custom:"
            yield f"{suggest(key)} ({declared}; {where})"


def _join_flags(
    cls: type[Settings],
    sections: dict[str, Any],
    values: Mapping[str, Any],
    given: Mapping[str, Any],
    result: dict[str, Any],
) -> Iterator[str]:
    """Set the flags that stand for keys of a section. The command line outranks the section; yields contradictions.

    A flag that stands for a key of a part, such as local.search_url, is not set: another part may be the one in use,
    and the flag would look as if somebody had typed it.
    """
    for name, key in cls.flags.items():
        in_section = lookup(sections.get(cls.section), key)
        if in_section is None:
            continue
        if name in given:
            sections[cls.section] = merged(sections[cls.section], nested(key, given[name]))
        elif name in values and values[name] != in_section:
            both = f"{shown(values[name], name)} and under {cls.section}: as {key}: {shown(in_section, key)}"
            yield f"{flag(name)} is given as {both}; keep one"
        elif "." not in key:
            result[name] = in_section
