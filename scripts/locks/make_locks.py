"""Makes the lock files of this folder from their inputs; `make locks` calls it, in an environment that has uv.

python scripts/locks/make_locks.py            resolves those whose inputs changed
python scripts/locks/make_locks.py --all      resolves all: takes newer versions where the inputs allow
python scripts/locks/make_locks.py --check    ends with status 1 if inputs changed since

A lock's first line holds a hash of its inputs, which tells that. A lock names every file by its hash, and no index and
no folder: it is installed from whatever index is configured. TransformerEngine's holds only what it adds to gpu-*.txt,
at versions that fit to it: with and without it, everything else is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LOCKS = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12")
PLATFORM = "x86_64-manylinux_2_35"
LEFT_OUT = {"transformer-engine-cu12"}
"""TransformerEngine's source package was published with the requirement of a build for CUDA 12. Beside the one for
CUDA 13 it would put the same files in the same places."""
RESOLVE = [
    *("uv", "pip", "compile", "--no-config", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"),
    *("--no-emit-index-url", "--no-emit-find-links", "--python-platform", PLATFORM, "--override", "overrides.in"),
    *("--only-binary", ":all:", "--no-binary", "transformer-engine-torch"),  # the one that is compiled
]


@dataclass(frozen=True)
class Lock:
    """`name`-`python`.txt, made from `name`.in; what the lock `beside` holds is left out."""

    name: str
    python: str
    beside: Lock | None = None

    @property
    def path(self) -> Path:
        return LOCKS / f"{self.name}-{self.python}.txt"

    def fingerprint(self) -> str:
        """A hash of all that decides what is resolved, but for what the index offers."""
        inputs = [LOCKS / f"{self.name}.in", LOCKS / "overrides.in"] + ([self.beside.path] if self.beside else [])
        parts = [self.python.encode(), PLATFORM.encode(), *(path.read_bytes() for path in inputs)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def is_current(self) -> bool:
        return self.path.is_file() and self.fingerprint() in self.path.read_text(encoding="utf-8").split("\n", 1)[0]

    def make(self, *, upgrade: bool) -> None:
        """Resolve anew; the versions of the present lock are kept where they still fit, unless `upgrade`."""
        known = LOCKS / "in-use.txt"  # uv takes what it writes to as the versions to prefer
        known.write_text(self.path.read_text(encoding="utf-8") if self.path.is_file() and not upgrade else "")
        command = [*RESOLVE, "--python-version", self.python, "--output-file", str(known)]
        command.append(str(LOCKS / f"{self.name}.in"))
        command += ["--constraint", str(self.beside.path)] if self.beside else []
        try:
            subprocess.run(command, check=True, cwd=LOCKS)
            text = known.read_text(encoding="utf-8")
        finally:
            known.unlink()
        held = LEFT_OUT | set(packages(self.beside.path.read_text(encoding="utf-8")) if self.beside else ())
        entries = [entry for name, entry in packages(text).items() if name not in held]
        head = f"# Made by `make locks` from {self.name}.in, for Python {self.python}; hash of the inputs: "
        self.path.write_text(head + self.fingerprint() + "\n" + "".join(entries), encoding="utf-8")


def packages(lock: str) -> dict[str, str]:
    """The entries of a lock by name: the line that pins a version, and those of its hashes."""
    return {match[1]: match[0] for match in re.finditer(r"^([\w.-]+)==.*\n(?:    .*\n)*", lock, re.MULTILINE)}


def locks() -> Iterator[Lock]:
    """All of them, in an order in which they can be made."""
    for python in PYTHONS:
        yield (base := Lock("gpu", python))
        yield Lock("gpu-te", python, beside=base)
        yield Lock("retriever-gpu", python)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="resolve all, and take newer versions")
    parser.add_argument("--check", action="store_true", help="make nothing; say which are not current")
    options = parser.parse_args(argv)
    for lock in locks():
        if options.check:
            continue
        if options.all or not lock.is_current():
            sys.stdout.write(f"resolving {lock.path.name}\n")
            lock.make(upgrade=options.all)
    stale = [lock.path.name for lock in locks() if not lock.is_current()]
    if stale:
        sys.stdout.write(f"made from other inputs than the present ones: {', '.join(stale)}; run `make locks`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
