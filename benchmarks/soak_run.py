"""A long run with faults at random: how far it comes, what each fault costs, and whether its end is exact.

    python -m benchmarks.soak_run [--steps 300] [--minutes 40] [--seed 1] [--every 90] [--output runs/soak]

The demo's run of small steps (`benchmarks.fault_trials`). About every EVERY seconds one fault of `FAULTS` is drawn:
SIGKILL of everything, or of one part, or a SIGSTOP of one part for some seconds. A run that ends is started again.
After STEPS steps, or at the first end after MINUTES minutes, the run is stopped as by ctrl-C, and its last checkpoint
is compared with one training without a break on the samples of its journal. Faults come from the seed; at which moment
of a run they fall depends on the machine. The last line is the result as JSON; OUTPUT/soak.jsonl has a line for each
fault.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_trials.rows import PARTS
from benchmarks.fault_trials.trial import Trial, end_on_term, send
from benchmarks.options import positive, whole_number
from sleuth.checkpoints import saved_step

FAULTS = [("kill", "everything"), *(("kill", part) for part in PARTS), *(("stop", part) for part in PARTS)]
STOPPED_SECONDS = (2.0, 20.0)
ENDS_THE_RUN = "trainer"
"""The part without which a run ends. It starts an engine and the rollout actor again; its start brings a retriever."""
MOST_SECONDS_TO_END = 600.0
"""After that part was killed; beyond it all of the run is killed, and the fault counts as not noticed."""


class Soak:
    """A run that is disturbed; `events` is what was done, in order."""

    def __init__(self, trial: Trial, seed: int, every: float, log: Path) -> None:
        self.trial, self.random, self.every, self.log = trial, random.Random(seed), every, log
        self.events: list[dict[str, Any]] = []
        self.began = time.monotonic()

    def go(self, seconds: float) -> bool:
        """Disturb the run until it has done all its steps, or for `seconds`; whether it has done all."""
        while True:
            self.trial.start()
            next_fault = time.monotonic() + self.random.uniform(0.5, 1.5) * self.every
            while self.trial.lives:
                if time.monotonic() - self.began > seconds:
                    self.interrupt()
                    return False
                if time.monotonic() > next_fault:
                    self.disturb(*self.random.choice(FAULTS))
                    next_fault = time.monotonic() + self.random.uniform(0.5, 1.5) * self.every
                time.sleep(0.2)
            assert self.trial.process is not None
            if self.trial.process.returncode == 0:
                return True
            self.note("ended", "the run", said=self.trial.last_words()[:300])
            if time.monotonic() - self.began > seconds:
                return False

    def disturb(self, what: str, part: str) -> None:
        victims = self.victims(part)
        if not victims:  # it has not started yet
            return
        if what == "stop":
            pause = self.random.uniform(*STOPPED_SECONDS)
            send(victims, signal.SIGSTOP)
            time.sleep(pause)
            send(victims, signal.SIGCONT)
            self.note(what, part, seconds=round(pause, 1))
            return
        if part == "everything":
            self.trial.kill_all()
        else:
            send(victims, signal.SIGKILL)
        self.note(what, part, **(self.wait_for_the_end() if part == ENDS_THE_RUN else {}))

    def wait_for_the_end(self) -> dict[str, Any]:
        """How long the run took to end, and whether it did so by itself."""
        began = time.monotonic()
        while self.trial.lives and time.monotonic() - began < MOST_SECONDS_TO_END:
            time.sleep(0.2)
        noticed = not self.trial.lives
        self.trial.kill_all()
        return {"seconds": round(time.monotonic() - began, 1), "noticed": noticed}

    def victims(self, part: str) -> list[psutil.Process]:
        if part == "retriever":
            retriever = self.trial.retriever
            return [psutil.Process(retriever.pid)] if retriever is not None and self.trial.retriever_lives else []
        driver = self.trial.process.pid if self.trial.process else 0
        found = self.trial.processes(PARTS.get(part, ""))
        return [process for process in found if part == "everything" or process.pid != driver]

    def interrupt(self) -> None:
        """As by ctrl-C: the last whole step is saved."""
        assert self.trial.process is not None
        self.trial.process.send_signal(signal.SIGINT)
        self.trial.end()

    def note(self, what: str, part: str, **more: Any) -> None:
        event = {"at": round(time.monotonic() - self.began, 1), "what": what, "part": part, **more}
        self.events.append(event)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
        print(json.dumps(event), flush=True)


def result(soak: Soak, done: bool) -> dict[str, Any]:
    """The figures of a soak. `exact` is None where no checkpoint was saved."""
    trial = soak.trial
    minutes = (time.monotonic() - soak.began) / 60
    trial.steps = saved_step(trial.save) or 0
    lines = trial.lines()
    return {
        "name": "soak_run",
        "minutes": round(minutes, 1),
        "steps": trial.steps,
        "all_steps": done,
        "starts": trial.starts,
        "faults": dict(Counter(f"{event['what']} {event['part']}" for event in soak.events)),
        "samples_from_journal": sum(int(line.get("rollout/from_journal", 0)) for line in lines),
        "ends": sorted({event["said"][:160] for event in soak.events if event["what"] == "ended"}),
        "exact": trial.is_exact() if trial.steps else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=whole_number(), default=300, help="steps after which the run is done")
    parser.add_argument("--minutes", type=positive(), default=40.0, help="after which the run is stopped")
    parser.add_argument("--every", type=positive(), default=90.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=whole_number(), default=1, help="of the faults")
    parser.add_argument("--output", type=Path, default=Path("runs/soak"), help="a new folder")
    options = parser.parse_args()
    if options.output.exists():
        parser.error(f"--output: expected a new folder, found {options.output}; name another")
    end_on_term()
    trial = Trial(options.output.resolve(), steps=options.steps, save_interval=5)
    try:
        soak = Soak(trial, options.seed, options.every, trial.folder / "soak.jsonl")
        done = soak.go(options.minutes * 60)
        print(json.dumps(result(soak, done)))
    finally:
        trial.close()


if __name__ == "__main__":
    main()
