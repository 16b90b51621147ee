"""Looks whether a machine, and a run, have what they need: a line each, with the remedy where something is wrong.

    python -m sleuth.doctor                                  this machine
    python -m sleuth.doctor <the flags of train.py>          also the run: model, tokenizer, data, hooks, search

Nothing is started and nothing written. Exits with 0 if nothing is wrong, with 1 if something is, and with 2 where the
flags themselves are: then the run is looked at without them. docs/doctor.md explains each line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from sleuth.arguments import Args, ArgumentsError, parse_args, parse_rest
from sleuth.doctor.findings import Finding, Verdict, findings_of, wrong
from sleuth.doctor.machine import machine_checks
from sleuth.doctor.run import RunChecks
from sleuth.secrets import redact

STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.WRONG: "bold red"}


def main(argv: Sequence[str] | None = None) -> int:
    """The findings, as they come; returns the exit code."""
    logging.basicConfig(level=logging.ERROR)
    words = sys.argv[1:] if argv is None else list(argv)
    if words in (["-h"], ["--help"]):
        sys.stdout.write(__doc__ or "")
        return 0
    console = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)
    counts = dict.fromkeys(Verdict, 0)
    code = 0
    try:
        args = parse_args(words) if words else None
    except ArgumentsError as error:
        args, code = parse_rest(words), 2
        rest = "without them" if args is not None else "when they are right"
        _print(console, wrong("flags", f"{error}\n  The run is looked at {rest}."))
        counts[Verdict.WRONG] += 1
    for finding in _findings(args):
        _print(console, finding)
        counts[finding.verdict] += 1
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return code or int(counts[Verdict.WRONG] > 0)


def _findings(args: Args | None) -> Iterator[Finding]:
    yield from findings_of(machine_checks())
    if args is not None:
        yield from findings_of(RunChecks(args).checks())


def _print(console: Console, finding: Finding) -> None:
    console.print(redact(str(finding)), style=None if finding.verdict is Verdict.OK else STYLES[finding.verdict])
    for line in finding.details.splitlines():
        console.print(f"       | {redact(line)}", style="dim")


if __name__ == "__main__":
    sys.exit(main())
