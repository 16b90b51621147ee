"""Lets a hook import names of another framework and get this project's stand-ins for them.

A hook that says `from slime.utils.types import Sample` gets the class of `sleuth.compat.slime`, whether slime is
installed or not: only the stand-ins work in a rollout of this project.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

STAND_INS = {"slime": "sleuth.compat.slime.names"}
"""For each package the module whose NAMES say what each of its modules holds."""


class _StandIns(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package not in STAND_INS:
            return None
        known = importlib.import_module(STAND_INS[package]).NAMES
        if fullname not in known and not any(name.startswith(f"{fullname}.") for name in known):
            raise ImportError(
                f"sleuth.compat stands in for {', '.join(known)}, and knows no {fullname}; write what you need of it "
                "into a module of your own"
            )
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        known = importlib.import_module(STAND_INS[module.__name__.partition(".")[0]]).NAMES
        vars(module).update(known.get(module.__name__, {}))


_finder = _StandIns()


def install_stand_ins() -> None:
    """From now on, imports of the packages in STAND_INS find the stand-ins; to be called before hooks are imported."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
