"""A small training run to try faults on: started as a user does, watched from outside, and compared in the end.

The run is the demo's, of four steps with a checkpoint every second one and an evaluation after each. It is exact if
weights, optimizer, random state and data cursor of its last checkpoint are bit for bit those of `--debug-train-only`:
one training, without a break, on the samples that the run's journal holds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "data/demo"
STEPS, SAMPLES = 4, 32
"""Of the run, and of each of its steps."""
WAIT_SECONDS = 900.0


class TrialError(Exception):
    """The trial could not be made; it says nothing about the run's reliability."""


class Trial:
    """One run, however often it is started again. Everything lies under `folder`."""

    def __init__(self, folder: Path, steps: int = STEPS, save_interval: int = 2) -> None:
        folder.mkdir(parents=True)
        self.folder, self.run_dir, self.save, self.steps = folder, folder / "run", folder / "save", steps
        self.save_interval = save_interval
        self.process: subprocess.Popen[bytes] | None = None
        self.retriever: subprocess.Popen[bytes] | None = None
        self.starts = 0

    # --- what is started

    def start_retriever(self) -> None:
        """Start a retrieval server, and have the next start of the run ask it."""
        place = self.folder / f"url_{self.starts}_{time.monotonic_ns()}"
        command = [sys.executable, "local_dense_retriever/retrieval_server.py", "--port", "0", "--url_file", str(place)]
        log = (self.folder / "retriever.txt").open("ab")
        self.retriever = subprocess.Popen(
            [*command, "--corpus_path", str(DEMO / "corpus.jsonl.gz")], cwd=ROOT, stdout=log, stderr=log
        )
        log.close()
        self.wait(place.exists, "the retrieval server", lives=lambda: self.retriever_lives)
        (self.folder / "search.yaml").write_text(
            f"search_r1: {{local: {{search_url: '{place.read_text().strip()}/retrieve'}}, topk: 1, max_turns: 2, "
            "max_observation_tokens: 48}\n"
        )

    @property
    def retriever_lives(self) -> bool:
        return self.retriever is not None and self.retriever.poll() is None

    def flags(self) -> list[str]:
        return [
            *("--hf-checkpoint", str(DEMO / "model"), "--prompt-data", str(DEMO / "train.parquet")),
            *("--apply-chat-template", "--custom-config-path", str(self.folder / "search.yaml")),
            *("--custom-rm-path", "generate_with_search.reward_func", "--rollout-shuffle", "--colocate"),
            *("--custom-generate-function-path", "generate_with_search.generate"),
            *("--num-rollout", str(self.steps), "--rollout-batch-size", "4", "--n-samples-per-prompt", "8"),
            *("--global-batch-size", str(SAMPLES), "--rollout-max-response-len", "48"),
            *("--rollout-max-context-len", "512", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048"),
            *("--lr", "1e-4", "--max-logprob-diff", "1e-4", "--save-interval", str(self.save_interval)),
            *("--save-keep", "0", "--eval-interval", "1", "--no-eval-before-train"),
            *("--eval-prompt-data", "demo", f"{DEMO / 'test.parquet'}@[0:8]"),
        ]

    def start(self, *more: str) -> None:
        """Start the run, or go on with it."""
        if not self.retriever_lives:
            self.start_retriever()
        self.starts += 1
        own = ["--run-dir", str(self.run_dir), "--save", str(self.save), "--load", str(self.save)]
        self._popen([*self.flags(), *own, *more], self.output_file)

    @property
    def output_file(self) -> Path:
        return self.folder / f"output_{self.starts}.txt"

    def output(self) -> str:
        return self.output_file.read_text(errors="replace") if self.output_file.exists() else ""

    def _popen(self, flags: Sequence[str], output: Path) -> None:
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *flags],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            )

    # --- waiting and ending

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait(
        self,
        condition: Callable[[], object],
        what: str,
        seconds: float = WAIT_SECONDS,
        lives: Callable[[], object] = lambda: True,
    ) -> float:
        """Wait until `condition` holds; the seconds that it took. TrialError where it never did."""
        began = time.monotonic()
        while not condition():
            if not lives():
                raise TrialError(f"expected {what}, found the process ended: {self.output()[-600:]}")
            if time.monotonic() - began > seconds:
                raise TrialError(f"expected {what} within {seconds:.0f} s: {self.output()[-600:]}")
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_for(self, condition: Callable[[], object], what: str) -> float:
        return self.wait(condition, what, lives=lambda: self.lives)

    def end(self, seconds: float = WAIT_SECONDS) -> int:
        """Wait for the run's end; its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TrialError(f"the run was not over after {seconds:.0f} s: {self.output()[-600:]}") from None

    def processes(self, log: str = "") -> list[psutil.Process]:
        """Those of the run: each holds a log of --run-dir open. `log` names one, for a part of the run."""
        place = self.run_dir / "logs"
        found = []
        for process in psutil.process_iter():
            try:
                files = [Path(file.path) for file in process.open_files()]
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if any(file.parent == place and (not log or file.name == log) for file in files):
                found.append(process)
        return found

    def kill_all(self) -> None:
        """SIGKILL for the whole tree at once, as by a machine that goes down."""
        if self.process is None:
            return
        tree = self.processes()
        if self.process.poll() is None:
            driver = psutil.Process(self.process.pid)
            tree += [*driver.children(recursive=True), driver]
        send(tree, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.kill_all()
        if self.retriever is not None:
            send([psutil.Process(self.retriever.pid)] if self.retriever_lives else [], signal.SIGCONT)
            self.retriever.kill()
            self.retriever.wait()

    # --- what is seen from outside

    def recorded(self, step: int) -> dict[tuple[int, int], Any]:
        """Samples of a step in the journal, by their place."""
        from sleuth.rollout.journal import read_step, step_file

        record = read_step(step_file(self.save / "journal", step))
        return {} if record is None else record.samples

    def rolled_out(self, step: int) -> bool:
        """Whether the step's samples are whole, so that training on them is what follows."""
        from sleuth.rollout.journal import read_step, step_file

        record = read_step(step_file(self.save / "journal", step))
        return record is not None and record.kept is not None

    def log_says(self, log: str, text: str) -> bool:
        path = self.run_dir / "logs" / log
        return path.exists() and text in path.read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """Those of metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def last_words(self) -> str:
        """The last line that the run printed."""
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def said(self, pattern: re.Pattern[str], start: int = 0) -> str:
        """The first line of the run's output from `start` in which the pattern is, without time, process and folder."""
        lines = (line for line in self.output()[start:].splitlines() if pattern.search(line))
        line = re.sub(r"^.* WARNING [\w.]+: ", "", next(lines, self.last_words()))
        return line.replace(f"{self.folder}/", "").replace(f"{ROOT}/", "")

    def resumed(self) -> str:
        """What a run that went on said of it, and how many samples it had from the journal."""
        line = next((line for line in self.output().splitlines() if line.startswith("resumed from")), "a new run")
        taken = sum(int(line.get("rollout/from_journal", 0)) for line in self.lines())
        return f"{line.replace(str(self.save), 'SAVE').strip()}; {taken} samples from the journal"

    def is_exact(self) -> bool:
        """Whether the run ended as one training without a break on its samples; see the module's docstring."""
        again = self.folder / "again"
        own = ["--run-dir", str(self.folder / "run_again"), "--save", str(again), "--debug-train-only", str(self.save)]
        output = self.folder / "output_again.txt"
        self._popen([*self.flags(), *own], output)
        if code := self.end():
            raise TrialError(f"the training to compare with ended with {code}: {output.read_text()[-600:]}")
        return same(content(self.save, self.steps), content(again, self.steps))


def end_on_term() -> None:
    """Have SIGTERM end this process as an error would, so that what it started is stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def content(save: Path, step: int) -> list[Any]:
    """A checkpoint's tensors (weights and optimizer), its rollout state with the cursor, and its random state."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    folder = save / f"iter_{step:07d}"
    keys = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    found = _load_state_dict_from_keys(keys, storage_reader=FileSystemReader(folder))
    tensors = {key: found[key] for key in sorted(keys) if torch.is_tensor(found.get(key))}
    state = json.loads((folder / "rollout_state.json").read_text())
    return [tensors, state, torch.load(folder / "rng_00000.pt", weights_only=True)]


def same(first: Any, second: Any) -> bool:
    """Whether two nests of tensors and plain values are equal bit for bit."""
    import torch

    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
