"""Where the time of the demo goes: seconds and processor seconds of each phase of a step, by process.

    python -m benchmarks.demo_step [--steps 6] [--questions 200] [--run-dir DIR] [-- FLAGS FOR train.py]
    python -m benchmarks.demo_step --steps 6 -- --sglang-chunked-prefill-size 512
    python -m benchmarks.demo_step --script run_smollm2.sh --steps 4 --questions 8 -- --dtype float32

It runs `run_demo.sh`, or another script with its options, and watches what that starts. The phases of a step are those
that train.py times (`time/...` in metrics.jsonl); the first step, which warms everything up, is left out, and the
others are averaged. "Busy" are processor seconds of a phase, by process: they are what to compare where other work
keeps the machine busy, and the column "others" says whether it did. Where they add up to less than the seconds times
the cores, cores had nothing to do or other work had them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.options import whole_number

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "sglang::scheduler": "engine: model",
    "sglang::detokenizer": "engine: text",
    "sleuth.engine.launch": "engine: HTTP",
    "ray::RolloutActor": "rollout",
    "ray::TrainActor": "trainer",
    "retrieval_server": "retriever",
}
"""What is found in a process's command line, and what the table calls it; the rest is the driver and Ray."""
REST, OTHERS = "driver, Ray", "others"
LOOK_SECONDS = 1.0
"""Between two looks for new processes."""
PHASES = ("rollout", "train", "sync", "rest of the step")


def kind_of(command: str) -> str:
    """What the table calls a process with this command line."""
    return next((kind for part, kind in KINDS.items() if part in command), REST)


@dataclass
class Usage:
    """Processor seconds so far of each kind of process, at several times (unix seconds)."""

    times: list[float] = field(default_factory=list)
    busy: list[dict[str, float]] = field(default_factory=list)

    def between(self, start: float, end: float) -> dict[str, float]:
        """Processor seconds of each kind between two times."""
        first, last = self._at(start), self._at(end)
        return {kind: last[kind] - first.get(kind, 0.0) for kind in last}

    def _at(self, when: float) -> Mapping[str, float]:
        """Between two samples it is a straight line."""
        i = bisect_left(self.times, when)
        if i in (0, len(self.times)):
            return self.busy[min(i, len(self.times) - 1)]
        before, after = self.busy[i - 1], self.busy[i]
        share = (when - self.times[i - 1]) / (self.times[i] - self.times[i - 1])
        return {kind: before.get(kind, 0.0) + share * (after[kind] - before.get(kind, 0.0)) for kind in after}


class Watch:
    """Samples what a process and all below it use, until it ends."""

    def __init__(self, process: subprocess.Popen[bytes], interval: float) -> None:
        self._process, self._interval = process, interval
        self._known: dict[psutil.Process, tuple[str, float]] = {}
        self._next_look = 0.0
        self.usage = Usage()

    def run(self) -> int:
        """The exit status of the process, once it has ended."""
        root = psutil.Process(self._process.pid)
        while self._process.poll() is None:
            self._sample(root)
            time.sleep(self._interval)
        return self._process.returncode

    def _sample(self, root: psutil.Process) -> None:
        if time.monotonic() > self._next_look:  # it takes longer than all the rest
            self._look(root)
            self._next_look = time.monotonic() + LOOK_SECONDS
        for process, (kind, _) in list(self._known.items()):
            with contextlib.suppress(psutil.Error):  # it has ended; what was seen of it counts
                times = process.cpu_times()
                self._known[process] = kind, times.user + times.system
        sums = dict.fromkeys([*KINDS.values(), REST], 0.0)
        for kind, seconds in self._known.values():
            sums[kind] += seconds
        machine = psutil.cpu_times()
        sums[OTHERS] = sum(machine) - machine.idle - machine.iowait - sum(sums.values())
        self.usage.times.append(time.time())
        self.usage.busy.append(sums)

    def _look(self, root: psutil.Process) -> None:
        """Find new processes, and new names: some get theirs after they have started."""
        with contextlib.suppress(psutil.Error):
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    seconds = self._known.get(process, ("", 0.0))[1]
                    self._known[process] = kind_of(" ".join(process.cmdline())), seconds


def phases(steps: Sequence[Mapping[str, float]]) -> list[tuple[str, float, float]]:
    """(phase, start, end) in unix seconds, of all steps after the first; and of evaluations, as `evaluation`."""
    found = []
    for step in steps:
        end = step["timestamp"] - step.get("time/save", 0.0)
        if "time/evaluation" in step:
            found.append(("evaluation", end - step["time/evaluation"], end))
            end -= step["time/evaluation"]
        if step["step"] < 2:
            continue
        at = end - step["time/step"]
        for phase in PHASES[:-1]:
            seconds = step.get(f"time/{phase}", 0.0)
            found.append((phase, at, at + seconds))
            at += seconds
        found.append((PHASES[-1], at, end))
    return found


def means(spans: Iterable[tuple[str, float, float]], usage: Usage) -> dict[str, dict[str, float]]:
    """For each phase the mean of its seconds, and of the processor seconds of each kind of process."""
    rows: dict[str, list[dict[str, float]]] = {}
    for phase, start, end in spans:
        rows.setdefault(phase, []).append({"seconds": end - start} | usage.between(start, end))
    return {
        phase: {name: sum(r[name] for r in found) / len(found) for name in found[0]} for phase, found in rows.items()
    }


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """A markdown table: a line for each phase, a column for each kind of process."""
    kinds = ["seconds", *KINDS.values(), REST, OTHERS]
    lines = ["| phase | " + " | ".join(kinds) + " |", "| --- |" + " --- |" * len(kinds)]
    for phase, row in rows.items():
        lines.append(f"| {phase} | " + " | ".join(f"{row[kind]:.2f}" for kind in kinds) + " |")
    return "\n".join(lines)


def summary(steps: Sequence[Mapping[str, float]], started: float, usage: Usage) -> dict[str, dict[str, float]]:
    """The rows of the table: start-up, the phases of a step, the whole step, an evaluation."""
    rows = means(phases(steps), usage)
    whole = {name: sum(rows[phase][name] for phase in PHASES) for name in rows[PHASES[0]]}
    # The first record is of the evaluation before training, or else of the first step.
    first = steps[0]["timestamp"] - steps[0].get("time/step", 0.0)
    start = {"seconds": first - started} | usage.between(started, first)
    evaluation = {"evaluation": rows.pop("evaluation")} if "evaluation" in rows else {}
    return {"start, first evaluation": start, **rows, "a step": whole, **evaluation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=("run_demo.sh", "run_smollm2.sh"), default="run_demo.sh")
    parser.add_argument(
        "--steps", type=whole_number(2), default=6, help="steps of the run, of which the first warms up [6]"
    )
    parser.add_argument("--questions", type=whole_number(), default=200, help="questions of an evaluation [200]")
    parser.add_argument(
        "--run-dir", type=Path, help="where the run's files go [a temporary folder, removed at the end]"
    )
    parser.add_argument("flags", nargs="*", help="after --: flags for train.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = (options.run_dir or Path(folder) / "run").resolve()
        command = ["bash", options.script, "--steps", str(options.steps), "--questions", str(options.questions)]
        started = time.time()
        with subprocess.Popen(
            [*command, "--run-dir", str(run_dir), "--", *options.flags], cwd=ROOT, stdout=sys.stderr
        ) as demo:
            watch = Watch(demo, interval=0.2)
            if status := watch.run():
                sys.exit(status)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = summary([json.loads(line) for line in lines], started, watch.usage)
    print(table(rows))
    seconds = rows["a step"]["seconds"]
    print(f"\n{3600 / seconds:.0f} steps an hour; {psutil.cpu_count()} cores")
    print(json.dumps({"name": "demo_step", "steps_per_hour": 3600 / seconds, "rows": rows}))


if __name__ == "__main__":
    main()
