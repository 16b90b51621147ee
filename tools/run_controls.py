"""Runs the demo's controls over several seeds, and draws what came of them: one figure, one table.

    python tools/run_controls.py --seeds 1 2                 # all; a run takes as long as the demo
    python tools/run_controls.py --seeds 1 --only base shuffled --docs
    python tools/run_controls.py --list                      # the command of each control

Each run is a command that is printed first: `run_demo.sh` with further flags (`tools/controls/catalog.py`). Stop it at
any time and start it again: finished runs are kept, one that was under way begins anew. `--docs` puts figure and table
into docs/evidence.md, and the numbers of each run into docs/measurements/controls.json; runs that this file has from
another machine, or from a folder that is gone, stay in figure and table.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pyarrow import parquet
from rich.console import Console

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.controls.catalog import CONTROLS, Control
from tools.controls.results import Run, draw, markdown, progress, put_into, read_results, write_results

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "docs/evidence.md"
FIGURE = ROOT / "docs/images/controls.png"
TEST_QUESTIONS = ROOT / "data/demo/test_mixed.parquet"
MEASUREMENTS = ROOT / "docs/measurements/controls.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """Where runs go, and what all of them share."""

    out: Path
    steps: int
    questions: int

    def command(self, run: Run) -> list[str]:
        """The command of a run; its results go to a folder that is renamed when the run is done."""
        options = {"steps": self.steps, "questions": self.questions, "seed": run.seed, "run-dir": self.unfinished(run)}
        shared = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        flags = ["--", *run.control.flags] if run.control.flags else []
        return ["bash", str(ROOT / "run_demo.sh"), *shared, *flags]

    def unfinished(self, run: Run) -> Path:
        return self.out / f"{run.folder.name}.unfinished"


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    chosen = [control for control in CONTROLS if control.name in options.only]
    questions = min(options.questions, parquet.read_metadata(TEST_QUESTIONS).num_rows)  # as the demo takes them
    plan = Plan(options.out.resolve(), options.steps, questions)
    runs = [Run(control, seed, plan.out) for seed in options.seeds for control in chosen]
    console = Console()
    if options.list:
        for run in runs:
            print(shlex.join(plan.command(run)))
        return 0
    plan.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _stop)
    failed = []
    for run in _unfinished_runs(runs, plan):
        console.print(progress(runs, plan.steps, plan.questions))
        if status := _execute(run, plan):
            failed.append(run)
            console.print(f"{run.folder.name} ended with status {status}; the others go on", markup=False)
    console.print(progress(runs, plan.steps, plan.questions))
    _publish(chosen, runs, plan, docs=options.docs)
    for run in failed:
        print(f"failed: {shlex.join(plan.command(run))}", file=sys.stderr)
    return 1 if failed else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [control.name for control in CONTROLS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="seeds of each control [1 2]")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="controls to run [all]")
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps of a run [40]")
    parser.add_argument("--questions", type=int, default=200, help="held-out questions of each evaluation [200]")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/controls", help="where runs go [runs/controls]")
    parser.add_argument("--docs", action="store_true", help="put figure and table into docs/evidence.md")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    return parser.parse_args(argv)


def _unfinished_runs(runs: Sequence[Run], plan: Plan) -> Iterator[Run]:
    for run in runs:
        if not run.result(plan.steps, plan.questions):
            yield run


def _execute(run: Run, plan: Plan) -> int:
    """Run a control from the start; its exit status. What an earlier attempt left is removed."""
    folder = plan.unfinished(run)
    for stale in (folder, run.folder):
        shutil.rmtree(stale, ignore_errors=True)
    print(f"+ {shlex.join(plan.command(run))}", flush=True)
    process = subprocess.Popen(plan.command(run), cwd=ROOT)
    try:
        status = process.wait()
    finally:
        if process.poll() is None:  # interrupted: the script stops what it started
            process.terminate()
            process.wait()
    if status == 0:
        folder.rename(run.folder)
    return status


def _stop(*_: Any) -> NoReturn:
    sys.exit(143)


def _publish(controls: Sequence[Control], runs: Sequence[Run], plan: Plan, *, docs: bool) -> None:
    """Figure and table of the runs that are done, in the folder of the runs and, if asked, in docs/evidence.md."""
    results = [result for run in runs if (result := run.result(plan.steps, plan.questions))]
    if not results:
        return
    if docs:
        known = [*read_results(MEASUREMENTS), *results]
        latest = {(result.steps, result.questions, result.control, result.seed): result for result in known}
        kept = [latest[key] for key in sorted(latest)]
        write_results(MEASUREMENTS, kept)
        results = [result for result in kept if (result.steps, result.questions) == (plan.steps, plan.questions)]
        controls = CONTROLS
    table = markdown(controls, results)
    (plan.out / "controls.md").write_text(table, encoding="utf-8")
    draw(controls, results, plan.out / "controls.png")
    print(f"{table}\nfigure: {plan.out / 'controls.png'}")
    if docs:
        shutil.copyfile(plan.out / "controls.png", FIGURE)
        EVIDENCE.write_text(put_into(EVIDENCE.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
