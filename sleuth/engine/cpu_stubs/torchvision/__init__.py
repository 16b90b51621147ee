"""Stands in for torchvision, whose build on PyPI does not load beside a CPU build of torch.

SGLang's multimodal modules import it at module level; text models never call it.
"""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+cpu.stub"


def missing_from(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """A module-level `__getattr__` whose functions raise NotImplementedError when called."""

    def getattr_of_module(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def missing(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"{module}.{name}: there is no torchvision here, only a stand-in")

        return missing

    return getattr_of_module
