"""What happens to a run when something fails: one row for each fault, with real engines and a real trainer.

    python -m benchmarks.faults --list
    python -m benchmarks.faults [--only "kill in sync" "dead engine"] [--output runs/faults] [--again]
    python -m benchmarks.faults --table          prints what is known so far

A row takes two or three small runs, about five minutes on two cores. Each is written to OUTPUT/faults.jsonl when it is
done: started again, the rest is done. The table says what was done, after how many seconds the run had noticed it (or,
for a kill of everything, was gone), what it said, and whether the resumed run ended bit for bit as one without a break.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.fault_trials.rows import ROWS, outcome
from benchmarks.fault_trials.trial import end_on_term


def known(path: Path) -> dict[str, dict[str, Any]]:
    """The rows that are done, by name; of one that was done again the latest. A line that was cut is left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["name"]] = row
    return found


def write_row(path: Path, row: dict[str, Any]) -> None:
    """Append one line; a line that was cut before it is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut + json.dumps(row) + "\n")


def table(rows: dict[str, dict[str, Any]]) -> str:
    """As markdown, in the order of the list."""
    lines = ["| fault | what was done | noticed after | what the run said | resumed exactly |", "|---|---|---|---|---|"]
    for name in ROWS:
        if name not in rows:
            continue
        row = rows[name]
        noticed = "" if row["noticed"] is None else f"{row['noticed']:.1f} s"
        exact = {True: "yes", False: "NO", None: "not tried"}[row["exact"]]
        said = row["said"].replace("|", "/").replace("\n", " ")[:300]
        lines.append(f"| {name} | {row['done']} | {noticed} | {said} | {exact} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--table", action="store_true", help="print the table of what is done and end")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ROWS, default=list(ROWS), help="do these rows")
    parser.add_argument("--again", action="store_true", help="do rows again that are done")
    parser.add_argument("--keep", action="store_true", help="keep the folders of rows that went well")
    parser.add_argument("--output", type=Path, default=Path("runs/faults"), help="folder of results and logs")
    options = parser.parse_args()
    path = options.output.resolve() / "faults.jsonl"
    if options.list:
        for name, (done, _) in ROWS.items():
            print(f"{name:22} {done}")
        return
    if options.table:
        print(table(known(path)))
        return
    end_on_term()
    for name in options.only:
        if name in known(path) and not options.again:
            continue
        folder = path.parent / f"{name.replace(' ', '_')}_{time.strftime('%H%M%S')}"
        row = outcome(name, folder)
        write_row(path, row)
        print(f"{name}: exact {row['exact']}, {row['seconds']} s; {row['said'][:200]}", flush=True)
        if row["exact"] and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    rows = known(path)
    print(table(rows))
    sys.exit(any(row["exact"] is False for row in rows.values()))


if __name__ == "__main__":
    main()
