"""Stands in for sgl-kernel, of which PyPI has no CPU build; SGLang imports `*_cpu` names from it unconditionally."""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+cpu.stub"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no sgl-kernel for this CPU")

    return missing
