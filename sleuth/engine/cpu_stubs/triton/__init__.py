"""Stands in for triton: lets kernels be defined, never compiled.

Any submodule can be imported. A lower-case attribute is a submodule that also works as a decorator (`@triton.jit`,
`@triton.autotune(...)`); a capitalised one is a class that can be subclassed; one that names an error is an exception.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar


class _StubBase:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _StubModule(ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            base = Exception if name.endswith("Error") or name.startswith("OutOf") else _StubBase
            value: Any = type(name, (base,), {"__module__": self.__name__})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Be a decorator, with or without arguments."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every `triton.*` submodule."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == f"{__name__}.language":
            module.constexpr = _Constexpr  # type: ignore[attr-defined]


class _Constexpr:
    """`tl.constexpr(3)` keeps its value: module-level constants of kernels are read back."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def _cdiv(a: int, b: int) -> int:
    return -(a // -b)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


sys.meta_path.insert(0, _StubFinder())
_module = sys.modules[__name__]
_module.__class__ = _StubModule
_module.__dict__.update(__version__="3.0.0", cdiv=_cdiv, next_power_of_2=_next_power_of_2)
