"""Whether the retrieval server's memory stays flat under load.

    python -m benchmarks.soak_retrieval [--seconds 120] [--clients 64] [--index_path FILE --retriever_name minilm]

Starts the server over the demo's corpus and asks it without pause: different queries, repeated ones, several at once,
bad requests, and clients that hang up in the middle. Prints its memory over time; ends with code 1 if, after the first
quarter, it grew by more than --tolerance_mb. The growth is that of the medians of the second and the last quarter, so
that one reading decides nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.options import positive, whole_number
from benchmarks.retrieval import CORPUS, make_queries, start_server

WORDS = 3
"""Of each query, at random: enough that few are asked twice."""


def requests(words: Sequence[str], seed: int) -> Iterator[tuple[bytes, int | None]]:
    """Bodies without end, and the status each must be answered with; None: the client hangs up."""
    rng = random.Random(seed)
    popular = [" ".join(rng.sample(words, WORDS)) for _ in range(50)]
    for number in itertools.count():
        queries = [" ".join(rng.sample(words, WORDS)) for _ in range(rng.choice([1, 1, 1, 2, 8]))]
        if number % 4 == 0:
            queries[0] = rng.choice(popular)
        body = {"queries": queries, "topk": rng.choice([1, 3, 3, 10]), "return_scores": bool(number % 2)}
        if number % 50 == 1:
            yield b'{"queries": [" "]}', 422
        else:
            yield json.dumps(body).encode(), None if number % 50 == 2 else 200


async def ask(url: str, words: Sequence[str], seed: int, end: float, statuses: Counter[str]) -> None:
    """One client; RuntimeError if an answer is not what it must be."""
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
        for body, expected in requests(words, seed):
            if time.monotonic() > end:
                return
            timeout = aiohttp.ClientTimeout(total=0.002 if expected is None else 60)
            try:
                async with session.post(f"{url}/retrieve", data=body, timeout=timeout) as answer:
                    await answer.read()
            except TimeoutError:
                if expected is not None:
                    raise
                statuses["hung up"] += 1
                continue
            statuses[str(answer.status)] += 1
            if answer.status != (expected or 200):
                raise RuntimeError(f"{body[:100]!r}: expected status {expected}, found {answer.status}")


async def soak(url: str, process: psutil.Process, args: argparse.Namespace) -> tuple[list[float], Counter[str]]:
    """The server's memory in MB, read `args.readings` times over `args.seconds`, and how requests ended."""
    words = sorted({word for query in make_queries() for word in query.split()})
    statuses: Counter[str] = Counter()
    end = time.monotonic() + args.seconds
    clients = [asyncio.create_task(ask(url, words, seed, end, statuses)) for seed in range(args.clients)]
    memory = []
    for _ in range(args.readings):
        await asyncio.sleep(args.seconds / args.readings)
        memory.append(process.memory_info().rss / 1e6)
    await asyncio.gather(*clients)
    return memory, statuses


def growth(memory: Sequence[float]) -> float:
    """MB by which the median of the last quarter exceeds that of the second."""
    quarter = len(memory) // 4
    return statistics.median(memory[-quarter:]) - statistics.median(memory[quarter : 2 * quarter])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=positive(), default=120.0, help="how long to ask the server [120]")
    parser.add_argument("--clients", type=whole_number(), default=64, help="clients at the same time [64]")
    parser.add_argument("--readings", type=whole_number(4), default=24, help="readings of the memory, at least 4 [24]")
    parser.add_argument(
        "--cache_size", type=whole_number(), default=2000, help="the server's; small, to fill it [2000]"
    )
    parser.add_argument("--tolerance_mb", type=positive(), default=8.0, help="growth in MB that is not a leak yet [8]")
    parser.add_argument("--retriever_name", default="bm25", help="the server's retriever [bm25]")
    parser.add_argument("--index_path", help="FAISS index for another --retriever_name")
    args = parser.parse_args()
    command = ["local_dense_retriever/retrieval_server.py", "--corpus_path", str(CORPUS), "--port", "0"]
    command += ["--cache_size", str(args.cache_size), "--retriever_name", args.retriever_name]
    command += ["--index_path", args.index_path] if args.index_path else []
    with start_server(command) as (url, process):
        memory, statuses = asyncio.run(soak(url, psutil.Process(process.pid), args))
    table = Table("seconds", "memory, MB", title=f"{args.retriever_name}: {dict(statuses)}")
    for number, reading in enumerate(memory, start=1):
        table.add_row(f"{number * args.seconds / len(memory):.0f}", f"{reading:.1f}")
    Console(width=100).print(table)
    grown = growth(memory)
    print(json.dumps({"growth_mb": round(grown, 2), "requests": statuses.total(), "tolerance_mb": args.tolerance_mb}))
    return int(grown > args.tolerance_mb)


if __name__ == "__main__":
    sys.exit(main())
