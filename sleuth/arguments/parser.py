"""Turns a command line and YAML files into validated settings.

The argparse parser is generated from the fields of the groups. It only splits the command line: all
values stay text until pydantic validates the merged whole, so that all errors look alike.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from sleuth.arguments.args import Args
from sleuth.arguments.checks import flag
from sleuth.arguments.neighbours import SAME_AS, UNSUPPORTED
from sleuth.arguments.run_flags import Group
from sleuth.arguments.sections import FileEntry, assign_sections
from sleuth.arguments.sglang_flags import PREFIX, clashes, is_option, option_from_yaml, take_options
from sleuth.secrets import hide, shown, without_passwords

NOT_FLAGS = {"custom_config", "sglang_options"}

REPEATABLE = {"custom_config_path"}
"""List flags that add to the list when they are given again; for all other flags the last one counts."""

ALSO = {"gpu_memory_gb": ["--gpu-memory"]}
"""Other spellings of flags."""

CLOSE = 0.65
"""How similar a flag must be to be suggested, from 0 to 1: far-fetched suggestions mislead."""

GroupT = TypeVar("GroupT", bound=Group)


class ArgumentsError(ValueError):
    """The command line or a configuration file is wrong; the message lists every problem on a line of its own."""


def parse_args(argv: Sequence[str] | None = None, *, model: type[GroupT] = Args) -> GroupT:  # type: ignore[assignment]
    """Settings from `argv` [sys.argv]; what it leaves out comes from `--custom-config-path`, then from defaults.

    `model` may be any class composed of groups, for tools that need only a part of the flags.
    Raises ArgumentsError (a ValueError) naming each wrong flag; `--help` exits.
    """
    given = _split(model, sys.argv[1:] if argv is None else argv)
    values = _with_files(given, model)
    try:
        return model.model_validate(values, context={"given": frozenset(given)})
    except ValidationError as error:
        raise ArgumentsError(_list_problems(_sentences(error, model))) from None


def parse_rest(argv: Sequence[str], *, model: type[GroupT] = Args) -> GroupT | None:  # type: ignore[assignment]
    """What is left of wrong settings where those that are wrong by themselves are dropped; None if that is too little.

    It may contradict itself: look at it, but run nothing with it.
    """
    try:
        values = _with_files(_split(model, argv, strict=False), model)
    except ArgumentsError:
        return None
    for _ in range(2):
        try:
            return model.model_validate(values, context={"contradictory": True})
        except ValidationError as error:
            wrong = {item["loc"][0] for item in error.errors() if item["loc"]}
            values = {name: value for name, value in values.items() if name not in wrong}
    return None


def _with_files(given: dict[str, Any], model: type[Group]) -> dict[str, Any]:
    """The values of the command line, and of the files that it names."""
    in_files, others = _from_files(given.get("custom_config_path", []), model)
    values = {**in_files, **given}
    if options := in_files.get("sglang_options", {}) | given.get("sglang_options", {}):
        values["sglang_options"] = options
        if problems := list(clashes(options)):
            raise ArgumentsError(_list_problems(problems))
    if others:
        with_hooks = {**_usual_hooks(model), **values}
        sections, problems = assign_sections(
            others, with_hooks, given, suggest=lambda key: _unknown(key, model, prefix="")
        )
        if problems:
            raise ArgumentsError(_list_problems(problems))
        values |= sections
    hide(*values.values())
    return values


def _usual_hooks(model: type[Group]) -> dict[str, Any]:
    """The hooks that a tool's own class of settings has where no flag names others; a run has none."""
    fields = {name: model.model_fields.get(name) for name in ("custom_generate_function_path", "custom_rm_path")}
    return {name: field.default for name, field in fields.items() if field is not None and field.default}


def parse_args_or_exit(argv: Sequence[str] | None = None, *, model: type[GroupT] = Args) -> GroupT:  # type: ignore[assignment]
    """`parse_args` for scripts: writes the problems to stderr and exits with 2 instead of raising."""
    try:
        return parse_args(argv, model=model)
    except ArgumentsError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(_list_problems([message]))


def _split(model: type[Group], argv: Sequence[str], *, strict: bool = True) -> dict[str, Any]:
    """The words of a command line by field; where it is not `strict`, unknown ones are dropped."""
    options: dict[str, list[str]] = {}
    if "sglang_options" in model.model_fields:
        options, argv = take_options(argv, known=_with_sglang_prefix(model))
    known, unknown = build_parser(model).parse_known_args(list(argv))
    if unknown and strict:
        raise ArgumentsError(_list_problems(list(_unknown_sentences(unknown, model))))
    return vars(known) | ({"sglang_options": options} if options else {})


def _with_sglang_prefix(model: type[Group]) -> set[str]:
    """Names that may look like SGLang's options and are not: fields, and what stands for a flag elsewhere."""
    return set(model.model_fields) | set(SAME_AS) | set(UNSUPPORTED)


def build_parser(model: type[Group] = Args) -> argparse.ArgumentParser:
    """An argparse parser with one argument group for each group of `model`."""
    parser = _Parser(
        usage="%(prog)s [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawTextHelpFormatter,
        description="Values come from the command line, then --custom-config-path, then defaults.",
    )
    for group in groups_of(model):
        section = parser.add_argument_group((group.__doc__ or group.__name__).strip())
        for name in group.__annotations__:
            if name in model.model_fields and name not in NOT_FLAGS:
                options: dict[str, Any] = {"action": "extend"} if name in REPEATABLE else {}
                section.add_argument(flag(name), *ALSO.get(name, ()), **_argument(model.model_fields[name]), **options)
    return parser


def groups_of(model: type[Group]) -> list[type[Group]]:
    """The groups a class is composed of, in the order of their fields."""
    return [base for base in reversed(model.__mro__) if Group in base.__bases__]


def _argument(field: FieldInfo) -> dict[str, Any]:
    kind = _plain_type(field.annotation)
    default = None if field.is_required() or field.default_factory else field.default
    shown = "" if default is None or default is False else f" [{_show(default)}]"
    options: dict[str, Any] = {"help": f"{field.description}{shown}".replace("%", "%%")}
    if kind is bool:
        return {**options, "action": argparse.BooleanOptionalAction}
    if get_origin(kind) is list:
        options["nargs"] = "+"
        kind = _plain_type(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return {**options, "metavar": "{" + ",".join(get_args(kind)) + "}"}
    return {**options, "metavar": {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")}


def _plain_type(annotation: Any) -> Any:
    """`Annotated[int, ...] | None` -> `int`."""
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return _plain_type(next(part for part in get_args(annotation) if part is not type(None)))
    return annotation


def _show(value: Any) -> str:
    if value is True:
        return "yes"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_files(paths: Sequence[str], model: type[Group]) -> tuple[dict[str, Any], list[FileEntry]]:
    """The flags in YAML files (a later file outranks an earlier one), and all other entries, which hooks may own."""
    values: dict[str, Any] = {}
    others: list[FileEntry] = []
    problems: list[str] = []
    for path in paths:
        for key, value in _read_yaml(Path(path)).items():
            name = key.replace("-", "_")
            if name == "custom_config_path":
                problems.append(
                    f"{path}: {key} cannot stand in a configuration file; give all files on the command line"
                )
            elif name in model.model_fields and name not in NOT_FLAGS:
                values |= {} if value is None else {name: value}
            elif "sglang_options" in model.model_fields and is_option(name, _with_sglang_prefix(model)):
                try:
                    values.setdefault("sglang_options", {})[name.removeprefix(PREFIX)] = option_from_yaml(key, value)
                except ValueError as error:
                    problems.append(f"{path}: {error}")
            elif name in UNSUPPORTED or name in NOT_FLAGS or "custom_config" not in model.model_fields:
                problems.append(f"{path}: {_unknown(key, model, prefix='')}")
            else:
                others.append(FileEntry(path, key, name, value))
    if problems:
        raise ArgumentsError(_list_problems(problems))
    return values, others


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number (YAML 1.1 wants 1.0e-4) and a repeated key is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        written = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # `<<: *base` is laid under
        keys = [self.construct_object(key, deep=True) for key in written]
        for key in keys:
            if keys.count(key) > 1:
                raise ArgumentsError(f"{node.start_mark.name}: {key} is given twice; keep one")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as stream:
            values = yaml.load(stream, _Loader)
    except OSError as error:
        raise ArgumentsError(
            f"--custom-config-path: expected a readable file, found {path} ({error.strerror})"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentsError(
            f"--custom-config-path: expected YAML in UTF-8, found {path} ({' '.join(str(error).split())}); correct it"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ArgumentsError(f"--custom-config-path: expected a mapping of flags in {path}, found {shown(values)}")
    return values


def _unknown_sentences(words: Sequence[str], model: type[Group]) -> Iterator[str]:
    flags = [word for word in words if word.startswith("--")]
    if not flags:
        yield f"expected flags, found {without_passwords(' '.join(words))}; a value belongs behind its flag"
    for word in flags:
        yield _unknown(word.split("=")[0], model, prefix="--")


def _unknown(key: str, model: type[Group], *, prefix: str) -> str:
    name = key.removeprefix("--").replace("-", "_")
    if name in UNSUPPORTED:
        return f"{key}: {UNSUPPORTED[name]}"
    names = [field for field in model.model_fields if field not in NOT_FLAGS]
    same = [SAME_AS[name]] if SAME_AS.get(name) in names else []
    nearest = same or difflib.get_close_matches(name, names, n=1, cutoff=CLOSE)
    if not nearest:
        return f"{key}: unknown; see --help"
    return f"{key}: unknown; did you mean {flag(nearest[0]) if prefix else nearest[0]}?"


def _sentences(error: ValidationError, model: type[Group]) -> Iterator[str]:
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else ""
        message = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        if item["type"] == "default_factory_not_called":
            continue
        if not name:
            yield from message.split("\n")
        elif item["type"] == "missing":
            yield f"{flag(name)} is required: {model.model_fields[name].description}"
        else:
            found = item["input"]
            yield f"{flag(name)}: {message}, found {shown(found)}. {model.model_fields[name].description}"


def _list_problems(problems: Sequence[str] | Iterator[str]) -> str:
    problems = list(problems)
    head = "wrong argument" if len(problems) == 1 else f"{len(problems)} wrong arguments"
    return head + "".join(f"\n  {problem}" for problem in problems)
