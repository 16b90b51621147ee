"""`Settings`: a hook's own typed settings, each default beside its type.

    class JudgeSettings(Settings, section="judge"):
        url: str = "http://127.0.0.1:9000"
        strictness: float = Field(0.5, ge=0, le=1)

    settings = JudgeSettings.of(args)       # in a hook: validated once, then cheap

A module that a hook flag names declares a section by each such class in it. Values come from the class, from
`defaults()`, from the section of that name in a `--custom-config-path` file, and from flags; each of these outranks
those before it. A wrong value is a ValueError of one sentence; for an unknown key it names the nearest known one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from sleuth.secrets import may_be_secret, shown

FREE_SECTION = "custom"
"""A section that hooks read as it is, from `args.custom_config["custom"]`; nobody declares or checks it."""


class SettingsPart(BaseModel):
    """Base class of a part of a section, and of sections: frozen, strict about types; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Settings(SettingsPart):
    """Base class of a hook's section.

    Class arguments: `section` is its name in YAML. With `flat=True` its keys are also accepted at the top level of the
    file. `flags` says which flag of the run sets which key, as in `{"search_url": "local.search_url"}`; a flag that is
    given outranks the file.
    """

    section: ClassVar[str] = ""
    flat: ClassVar[bool] = False
    flags: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(
        cls, section: str = "", flat: bool = False, flags: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls.section = section or cls.section
        if cls.section:
            _classes.setdefault(cls.section, []).append(cls)
        cls.flat, cls.flags = flat or cls.flat, flags or cls.flags

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        """Defaults that outrank those of the class, read anew each time; a hook may keep them in a place of its own."""
        return {}

    @classmethod
    def of(cls, args: Any) -> Self:
        """The settings from the arguments of a run, or from a mapping of keys; an instance is returned unchanged.

        The result is cached, so that the same values are validated once. Raises ValueError of one sentence.
        """
        if isinstance(args, cls):
            return args
        values = merged(cls.defaults(), args if isinstance(args, Mapping) else _given(cls, args))
        written = repr(values)  # what is merged can be changed in place
        cached = _cache.get(cls)
        if cached is None or cached[0] != written:
            cached = _cache[cls] = (written, cls._validated(values))
        return cached[1]

    @classmethod
    def _validated(cls, values: Any) -> Self:
        try:
            return cls.model_validate(values)
        except ValidationError as errors:
            raise ValueError(
                f"{cls.section}: " + "; ".join(explain_error(error, cls) for error in errors.errors())
            ) from None


_classes: dict[str, list[type[Settings]]] = {}
"""Every class of a section, by its name: a copy of a hook may have more keys than the original."""
_cache: dict[type[Settings], tuple[str, Any]] = {}
"""The last settings of each class, under the values they were made of."""


def _given(cls: type[Settings], args: Any) -> Any:
    """What the arguments of a run hold for a section: its keys, top-level keys if it is flat, and its flags."""
    custom = getattr(args, "custom_config", None) or {}
    values = custom.get(cls.section) or {}
    if not isinstance(values, Mapping):
        return values
    others = {key for other in _classes.get(cls.section, ()) if other is not cls for key in other.model_fields}
    values = {key: value for key, value in values.items() if key in cls.model_fields or key not in others}
    if cls.flat:
        attributes = {name: getattr(args, name) for name in cls.model_fields if hasattr(args, name)}
        values = {**attributes, **{name: custom[name] for name in cls.model_fields if name in custom}, **values}
    for flag, key in cls.flags.items():
        if (value := getattr(args, flag, None)) is not None and not (value is False and lookup(values, key)):
            values = merged(values, nested(key, value))
    return values


def merged(base: Any, over: Any) -> Any:
    """`over` laid over `base`, mapping by mapping."""
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}


def nested(key: str, value: Any) -> dict[str, Any]:
    """`"local.search_url", x` -> `{"local": {"search_url": x}}`."""
    head, _, rest = key.partition(".")
    return {head: nested(rest, value) if rest else value}


def lookup(values: Any, key: str) -> Any:
    """The value under a dotted key, or None."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


# --- What a run's hooks declare ---


def settings_of(module: ModuleType) -> list[type[Settings]]:
    """The sections that a module declares, a class's own subclass in its place.

    Raises ValueError if two of its classes have one section.
    """
    found = {value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Settings)}
    found -= {base for cls in found for base in cls.__mro__[1:] if getattr(base, "section", "") == cls.section}
    classes = sorted((cls for cls in found if cls.section), key=lambda cls: cls.__name__)
    names = [cls.section for cls in classes]
    for name in names:
        if names.count(name) > 1:
            both = ", ".join(cls.__name__ for cls in classes if cls.section == name)
            raise ValueError(
                f"{module.__name__}: expected one class for the section {name}, found {both}; rename a section"
            )
    return classes


def declared_settings(modules: Iterable[ModuleType]) -> list[type[Settings]]:
    """The sections that modules declare, each class once."""
    return list(dict.fromkeys(cls for module in modules for cls in settings_of(module)))


def resolve_sections(args: Any, classes: Iterable[type[Settings]]) -> dict[str, dict[str, Any]]:
    """Every section as the hooks will see it, defaults included, in types that JSON has; ValueError if one is wrong.

    Two modules may share a section. Each takes the keys that it knows, so that one may be a copy with further keys.
    """
    sections: dict[str, dict[str, Any]] = {}
    for cls in classes:
        sections[cls.section] = sections.get(cls.section, {}) | cls.of(args).model_dump(mode="json")
    return sections


# --- What is wrong, in a sentence ---


def explain_error(error: Mapping[str, Any], cls: type[BaseModel]) -> str:
    """One of pydantic's errors as `key: expected ..., found ...`."""
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if error["type"] == "extra_forbidden":
        return unknown_key(key, known_keys(cls, path[:-1]))
    if error["type"] == "missing":
        return f"{key}: expected a value, found none"
    if not key:
        return (
            message
            if error["type"] == "value_error"
            else f"expected a section of keys and values, found {_short(error)}"
        )
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        message = "expected a section of keys and values"
    hidden = path[-1] == "proxy" or any(map(may_be_secret, path)) or "found" in message
    return f"{key}: {message}" + ("" if hidden else f", found {_short(error)}")


def _short(error: Mapping[str, Any]) -> str:
    return shown(error["input"])


def known_keys(cls: type[BaseModel], path: Iterable[str]) -> list[str]:
    """The keys of a class, or of the part of it that a path of keys leads to."""
    for name in path:
        part = next(_parts(cls.model_fields[name].annotation), None)
        if part is None:
            return []
        cls = part
    return list(cls.model_fields)


def _parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _parts(inner)


def unknown_key(key: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    """`tpok: unknown; did you mean topk? Known are ...`; `show` writes a suggestion."""
    known = list(known)
    near = get_close_matches(key.rpartition(".")[2], known, n=1)
    hint = f"did you mean {show(near[0])}? " if near else ""
    return f"unknown key {key}; {hint}known are {', '.join(known) or 'none'}"
