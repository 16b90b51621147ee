"""Makes the lock files of this folder from their inputs; `make locks` calls it, in an environment that has uv.

python scripts/locks/make_locks.py            resolves those whose inputs changed
python scripts/locks/make_locks.py --all      resolves all: takes newer versions where the inputs allow
python scripts/locks/make_locks.py --check    ends with status 1 if inputs changed since
python scripts/locks/make_locks.py --verify   resolves all, writes nothing, ends with status 1 where a lock differs

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
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
HASH = re.compile(r"sha256:[0-9a-f]+")
UNREACHABLE = "Failed to fetch"
"""What uv says where it cannot reach the index."""


class ResolveError(RuntimeError):
    """uv found no versions that fit together, or no index; the message is its own."""


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
        entries = self.resolve("" if upgrade else self.present())
        head = f"# Made by `make locks` from {self.name}.in, for Python {self.python}; hash of the inputs: "
        self.path.write_text(head + self.fingerprint() + "\n" + "".join(entries.values()), encoding="utf-8")

    def present(self) -> str:
        return self.path.read_text(encoding="utf-8") if self.path.is_file() else ""

    def resolve(self, known: str) -> dict[str, str]:
        """The entries that the inputs give, by package; versions that `known` pins are preferred.

        Raises ResolveError.
        """
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "lock.txt"  # uv takes what it writes to as the versions to prefer
            target.write_text(known, encoding="utf-8")
            command = [*RESOLVE, "--python-version", self.python, "--output-file", str(target)]
            command.append(str(LOCKS / f"{self.name}.in"))
            command += ["--constraint", str(self.beside.path)] if self.beside else []
            done = subprocess.run(command, cwd=LOCKS, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise ResolveError(f"{self.path.name} cannot be resolved\n{done.stderr}")
            text = target.read_text(encoding="utf-8")
        held = LEFT_OUT | set(packages(self.beside.present()) if self.beside else ())
        return {name: entry for name, entry in packages(text).items() if name not in held}

    def differences(self) -> list[str]:
        """How the lock differs from what its inputs give with the lock's versions preferred.

        The hashes must be among those of the index, which may have got further files since.
        """
        locked = packages(self.present())
        pins = "".join(f"{entry.split(' ', 1)[0]}\n" for entry in locked.values())
        resolved = self.resolve(pins)
        found = []
        for name in sorted(locked.keys() | resolved.keys()):
            ours, theirs = (entries.get(name, "none ") for entries in (locked, resolved))
            pin, expected = (entry.split(" ", 1)[0] for entry in (ours, theirs))
            if pin != expected:
                found.append(f"{self.path.name}: {name} is {pin}, expected {expected}")
            elif unknown := set(HASH.findall(ours)) - set(HASH.findall(theirs)):
                found.append(
                    f"{self.path.name}: {name} has hashes that the index does not: {', '.join(sorted(unknown))}"
                )
        return found


def packages(lock: str) -> dict[str, str]:
    """The entries of a lock by name: the line that pins a version, and those of its hashes."""
    return {match[1]: match[0] for match in re.finditer(r"^([\w.-]+)==.*\n(?:    .*\n)*", lock, re.MULTILINE)}


def locks() -> Iterator[Lock]:
    """All of them, in an order in which they can be made."""
    for python in PYTHONS:
        yield (base := Lock("gpu", python))
        yield Lock("gpu-te", python, beside=base)
        yield Lock("retriever-gpu", python)


def verify() -> int:
    """Resolve all locks anew and print what differs. Where the index cannot be reached that is told, and no error."""
    try:
        with ThreadPoolExecutor() as pool:  # most of the time goes into waiting for the index
            wrong = [sentence for found in pool.map(Lock.differences, locks()) for sentence in found]
    except ResolveError as error:
        sys.stdout.write(f"{error}\n")
        return 0 if UNREACHABLE in str(error) else 1
    remedy = ["run `make locks`, or with LOCKS=--all where the inputs are unchanged"] if wrong else []
    sys.stdout.write("".join(f"{sentence}\n" for sentence in [*wrong, *remedy]))
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="resolve all, and take newer versions")
    parser.add_argument("--check", action="store_true", help="make nothing; say which are not current")
    parser.add_argument("--verify", action="store_true", help="make nothing; resolve all, and say what differs")
    options = parser.parse_args(argv)
    if options.verify:
        return verify()
    for lock in locks():
        if options.check:
            continue
        if options.all or not lock.is_current():
            sys.stdout.write(f"resolving {lock.path.name}\n")
            try:
                lock.make(upgrade=options.all)
            except ResolveError as error:
                sys.exit(str(error))
    stale = [lock.path.name for lock in locks() if not lock.is_current()]
    if stale:
        sys.stdout.write(f"made from other inputs than the present ones: {', '.join(stale)}; run `make locks`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
