"""What rollout processes carry as engines are added, and what large layouts take: memory and traffic.

    python -m benchmarks.scale [--engines 1 4 16 64] [--requests 256] [--trajectories 4096] [--steps 2] [--seconds 2]
    python -m benchmarks.scale --workers 1 2 4 --engines 16
    python -m benchmarks.scale --layouts

The first drives the real rollout: the manager of a run, here in a plain process and not a Ray actor, with hooks, search
client, journal, metrics and packing, and a retrieval server with BM25 over the demo's corpus. Only the engines are
scripted: a process that listens on one port for each engine answers a turn that searches, for something else each time,
then a turn that answers, each after SECONDS seconds, give or take half. A step has REQUESTS trajectories for each
engine, at most TRAJECTORIES, all in flight from its beginning. A first step warms up. With --workers above 1 the hooks
run in that many Ray actors (`--rollout-workers`). CPU seconds are those of whole processes, all threads, and are what
to compare on a busy machine; speed is not. What a machine with enough cores carries follows from them: as many
trajectories a second as the busiest process has CPU time for. The driver is left out: in a run it waits for the
manager, and passes on references to what that made.

The last line is one JSON object. Its ratio is what the last number of workers carries over what the first does, with
the most engines; with one number of workers, the CPU time that a trajectory costs with the most engines over that with
the fewest. With --layouts it is the layouts' figures (`benchmarks.scaling.layouts`).
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import requests
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.options import positive, whole_number
from benchmarks.scaling.layouts import print_layouts
from benchmarks.scaling.scripted_engines import ScriptedEngines, make_script
from sleuth.arguments import Args, parse_args
from sleuth.cluster.placement import ray_session
from sleuth.cluster.preflight import preflight
from sleuth.cluster.rollout_workers import RolloutWorkers
from sleuth.data import load_rows
from sleuth.rollout.collector import relax_garbage_collector
from sleuth.rollout.manager import RolloutManager

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "data/demo"
GROUP = 8
TURNS = 2
PROMPT_END = 4
"""Tokens by which a prompt's end is told from that of an observation."""
START_SECONDS, END_SECONDS = 400.0, 60.0
LINEAR = 0.8
"""Share of the growth of what is in flight by which speed must grow to be called linear."""


@dataclass(frozen=True)
class Size:
    """One number of engines: means of its steps. CPU seconds are for 1,000 trajectories."""

    engines: int
    workers: int
    in_flight: int
    most_requests: int
    """To all engines at once."""
    trajectories_per_second: float
    events_per_second: float
    """Requests to engines and searches."""
    manager: float
    hooks: float
    """All workers together; 0 where the hooks run in the manager."""
    retriever: float
    scripted_engines: float
    manager_core: float
    """The share of the time for which the manager kept a core busy."""
    manager_gb: float

    @property
    def carries(self) -> float:
        """Trajectories/s for which the busiest process has the time, where each has a core of its own."""
        return 1000 / max(self.manager, self.hooks / self.workers)

    @property
    def cost(self) -> float:
        """CPU seconds of manager and workers for 1,000 trajectories."""
        return self.manager + self.hooks


class Manager:
    """The rollout manager in a process of its own, as the Ray actor of a run has it; a context manager."""

    def __init__(self, args: Args, run_dir: Path, urls: Sequence[str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_manage, args=(theirs, args, run_dir, list(urls)), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is noticed
        self.pids: list[int] = self._pipe.recv()
        """Of the manager, then of its workers."""

    def generate(self, step: int) -> dict[str, float]:
        """The metrics of a step."""
        self._pipe.send(step)
        found: dict[str, float] = self._pipe.recv()
        return found

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(END_SECONDS)
        self._process.terminate()
        self._process.join()


def _manage(pipe: Connection, args: Args, run_dir: Path, urls: list[str]) -> None:
    with ray_session(args) if args.rollout_workers > 1 else nullcontext():
        workers = RolloutWorkers(args, run_dir) if args.rollout_workers > 1 else None
        manager = RolloutManager(args, run_dir, workers=workers)
        processes = [] if workers is None else workers.wait_until_loaded()
        manager.connect(urls, {})
        relax_garbage_collector()
        pipe.send([os.getpid(), *(process.pid for process in processes)])
        while (step := pipe.recv()) is not None:
            data = manager.generate(step)
            for shard in data.shards:
                pickle.dumps(shard, protocol=5)  # what putting it into Ray's store takes
            pipe.send(data.metrics)


def cpu_seconds(pid: int) -> float:
    """Of a process with all its threads, and those of its children that ended."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@contextmanager
def retriever(folder: Path) -> Iterator[tuple[int, str]]:
    """A retrieval server over the demo's corpus: its pid and URL."""
    url_file = folder / "url"
    command = [sys.executable, "local_dense_retriever/retrieval_server.py", "--port", "0", "--url_file", str(url_file)]
    with (folder / "retriever.log").open("wb") as log:
        words = [*command, "--corpus_path", str(DEMO / "corpus.jsonl.gz")]
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not url_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"the retrieval server did not start: {(folder / 'retriever.log').read_text()[-2000:]}"
                )
            time.sleep(0.1)
        yield process.pid, url_file.read_text().strip()
    finally:
        process.terminate()
        process.wait()


def run_args(folder: Path, search_url: str, in_flight: int, requests_each: int, workers: int) -> Args:
    """The flags of a run whose steps have `in_flight` trajectories."""
    config = folder / "search.yaml"
    config.write_text(f"search_r1: {{local: {{search_url: '{search_url}/retrieve'}}, max_turns: {TURNS}}}\n")
    group = min(GROUP, in_flight)
    words = [
        *("--hf-checkpoint", DEMO / "model", "--prompt-data", DEMO / "train.parquet", "--apply-chat-template"),
        *("--custom-config-path", config, "--custom-rm-path", "generate_with_search.reward_func", "--rollout-shuffle"),
        *("--custom-generate-function-path", "generate_with_search.generate", "--colocate"),
        *("--rollout-batch-size", in_flight // group, "--n-samples-per-prompt", group),
        *("--global-batch-size", in_flight // group * group, "--rollout-max-concurrency", requests_each),
        *("--rollout-max-response-len", 512, "--rollout-max-context-len", 2048),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 16384, "--balance-data"),
        *("--run-dir", folder / "run", "--save", folder / "save", "--rollout-workers", workers),
    ]
    return preflight(parse_args([str(word) for word in words]), warn=lambda text: None)


def make_queries(count: int) -> list[str]:
    """That many different queries, some words of a passage each."""
    with gzip.open(DEMO / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        passages = [json.loads(line)["contents"].split() for line in file]
    found: dict[str, None] = {}
    for start in itertools.count(0, 5):
        for words in passages:
            if len(query := " ".join(words[start : start + 5])) > 10:
                found[query] = None
            if len(found) == count:
                return list(found)
    raise AssertionError("a count has no end")


def measure(
    engines: int, workers: int, options: argparse.Namespace, folder: Path, search: tuple[int, str], progress: Progress
) -> Size:
    """Some steps with these numbers of engines and workers; `search` is pid and URL of the retrieval server."""
    in_flight = min(options.trajectories, engines * options.requests)
    args = run_args(folder, search[1], in_flight, options.requests, workers)
    tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
    prompt_end = load_rows(args.prompt_data, args, tokenizer)[0].prompt_ids[-PROMPT_END:]
    queries = make_queries(in_flight * (options.steps + 1))
    task = progress.add_task(f"{engines} engines, {in_flight} in flight, {workers} workers", total=options.steps + 1)
    script = make_script(engines, prompt_end, queries, tokenizer, options.seconds)
    with ScriptedEngines(script) as scripted, Manager(args, folder / "run", scripted.urls) as manager:
        pids = {
            "manager": manager.pids[:1],
            "hooks": manager.pids[1:],
            "retriever": [search[0]],
            "scripted_engines": [scripted.pid],
        }
        found: list[dict[str, float]] = []
        for step in range(1, options.steps + 2):
            before, start = {name: sum(map(cpu_seconds, those)) for name, those in pids.items()}, time.perf_counter()
            metrics = manager.generate(step)
            seconds = time.perf_counter() - start
            used = {name: sum(map(cpu_seconds, those)) - before[name] for name, those in pids.items()}
            found.append(used | {"seconds": seconds, "searches": metrics["rollout/searches"] * in_flight})
            progress.advance(task)
        most = requests.get(f"{scripted.urls[0]}/report", timeout=60).json()["most"]
        gigabytes = psutil.Process(manager.pids[0]).memory_info().rss / 1e9
    return summary(engines, workers, in_flight, most, found[1:], gigabytes)


def summary(
    engines: int, workers: int, in_flight: int, most: int, steps: Sequence[dict[str, float]], gigabytes: float
) -> Size:
    """The means over the steps."""
    of = {name: mean(step[name] for step in steps) for name in steps[0]}
    thousands = in_flight / 1000
    return Size(
        engines,
        workers,
        in_flight,
        most,
        in_flight / of["seconds"],
        (TURNS * in_flight + of["searches"]) / of["seconds"],
        *(of[name] / thousands for name in ("manager", "hooks", "retriever", "scripted_engines")),
        of["manager"] / of["seconds"],
        gigabytes,
    )


def verdict(sizes: Sequence[Size]) -> str:
    """Up to which size speed grows as what is in flight does, and what the last one's processes carry at most."""
    linear = sizes[0]
    for before, size in itertools.pairwise(sizes):
        growth = size.trajectories_per_second / before.trajectories_per_second
        if growth < LINEAR * size.in_flight / before.in_flight:
            break
        linear = size
    last = sizes[-1]
    processes = "one process carries" if last.workers == 1 else f"a manager and {last.workers} workers carry"
    return (
        f"speed grows with what is in flight up to {linear.engines} engines and {linear.in_flight} trajectories; at "
        f"{last.cost:.2f} CPU s per 1,000, {processes} {last.carries:.0f} trajectories/s at most"
    )


def table(sizes: Sequence[Size]) -> Table:
    made = Table(title="The rollout, with scripted engines", title_justify="left")
    groups = ("engines", "workers", "in flight", "requests at once", "trajectories/s", "events/s", "growth")
    cpu = ("manager", "workers", "retriever", "(engines)")
    for name in (*groups, *(f"CPU s/1,000: {name}" for name in cpu), "carries/s", "manager's core", "its memory"):
        made.add_column(name, justify="right")
    for size in sizes:
        speed = size.trajectories_per_second / sizes[0].trajectories_per_second
        made.add_row(
            *(str(value) for value in (size.engines, size.workers, size.in_flight, size.most_requests)),
            f"{size.trajectories_per_second:.0f}",
            f"{size.events_per_second:.0f}",
            f"{speed:.1f} of {size.in_flight / sizes[0].in_flight:.0f}",
            *(f"{value:.2f}" for value in (size.manager, size.hooks, size.retriever, size.scripted_engines)),
            f"{size.carries:.0f}",
            f"{size.manager_core:.0%}",
            f"{size.manager_gb:.1f} GB",
        )
    return made


def drive(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure all sizes and print their table; the result."""
    logging.disable(logging.WARNING)
    sizes = []
    with (
        tempfile.TemporaryDirectory() as name,
        Progress(console=console, transient=True) as progress,
        retriever(Path(name)) as search,
    ):
        for workers, engines in itertools.product(options.workers, options.engines):
            folder = Path(name) / f"{workers}_{engines}"
            folder.mkdir()
            sizes.append(measure(engines, workers, options, folder, search, progress))
    console.print(table(sizes))
    for workers in dict.fromkeys(options.workers):
        console.print(verdict([size for size in sizes if size.workers == workers]))
    first, last = sizes[0].cost, sizes[-1].cost
    if len(options.workers) > 1:
        first, last = sizes[len(options.engines) - 1].carries, sizes[-1].carries
    ratio = {"name": "scale", "ratio": last / first, "ours": last, "reference": first}
    return ratio | {"sizes": [asdict(size) for size in sizes]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = whole_number()
    parser.add_argument("--engines", type=number, nargs="+", default=[1, 4, 16, 64], help="numbers of engines")
    parser.add_argument("--workers", type=number, nargs="+", default=[1], help="numbers of rollout workers [1]")
    parser.add_argument("--requests", type=number, default=256, help="under way to one engine at most [256]")
    parser.add_argument("--trajectories", type=number, default=4096, help="in flight at most [4096]")
    parser.add_argument("--steps", type=number, default=2, help="that are measured, after one to warm up [2]")
    parser.add_argument("--seconds", type=positive(), default=2.0, help="of a turn, in the mean [2]")
    parser.add_argument("--layouts", action="store_true", help="memory and traffic of large layouts instead")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    print(json.dumps(print_layouts(console) if options.layouts else drive(options, console)))


if __name__ == "__main__":
    main()
