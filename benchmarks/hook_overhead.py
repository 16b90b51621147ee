"""What the search hook costs on top of its HTTP requests.

    python -m benchmarks.hook_overhead [--trajectories 1000] [--concurrency 256] [--group 8] [--trials 7]

A stand-in for engine and retrieval server, a process of its own, answers at once: a turn that searches, three
passages of the demo's corpus, a turn that answers. `generate` holds whole conversations with it. All queries differ,
so each is asked; the trajectories of a group of eight, as GRPO samples them, find the same passages (`--group 1`: all
differ, and every observation is encoded anew, which is most of the cost). Reference: a plain loop with the same HTTP
library that only sends the same three requests and parses what comes back, by Python's own JSON; beside it the same
loop with orjson, which ours uses for the engine. The garbage collector is set for all as it is in a rollout. They take
turns; the last line is one JSON object, its ratio the median of the trials' trajectories per second, ours /
reference.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import aiohttp
import orjson
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.options import whole_number
from generate_with_search import generate
from sleuth.hooks import RolloutContext, use_rollout_context
from sleuth.rollout.collector import relax_garbage_collector
from sleuth.rollout.engine_client import FIXED_SAMPLING_PARAMS, EngineClient
from sleuth.sample import Sample, SampleStatus, TokenTrace
from sleuth.search import format_observation, to_passage

CORPUS = Path(__file__).resolve().parent.parent / "data/demo/corpus.jsonl.gz"
PROMPT = "Answer the question. Think first, search where you lack knowledge. " * 8 + "\nQuestion: where is it?\n"
THINK = "<think>I need to find out where it is, and what else is known about it, before I can answer.</think>"
PARAMS = {"temperature": 1.0, "max_new_tokens": 512}
Conversation = Callable[[int], Awaitable[None]]


def read_contents(limit: int) -> list[str]:
    with gzip.open(CORPUS, "rt", encoding="utf-8") as file:
        return [json.loads(line)["contents"] for line in itertools.islice(file, limit)]


def train_tokenizer(texts: list[str], vocab_size: int = 8192) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with about four characters a token on English, as a real model's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def different_hits(contents: list[str]) -> Iterator[list[dict[str, Any]]]:
    """What searches find, three passages each, never the same three."""
    for stride in itertools.count(1):
        for start in range(len(contents)):
            chosen = (contents[(start + rank * stride) % len(contents)] for rank in range(3))
            yield [{"document": {"id": "0", "contents": text}, "score": 0.5} for text in chosen]


# --- The stand-in ---


def engine_answer(text: str, tokenizer: PreTrainedTokenizerBase) -> bytes:
    """What SGLang answers for a turn of this text."""
    ids = tokenizer.encode(text)
    entries = [[-0.123456 - 0.001 * position, token, None] for position, token in enumerate(ids)]
    meta = {
        "id": "0",
        "finish_reason": {"type": "stop", "matched": "</search>"},
        "prompt_tokens": 100,
        "completion_tokens": len(ids),
        "output_token_logprobs": entries,
        "weight_version": "1",
    }
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})


def serve(pipe: Connection, prompt_length: int, turns: tuple[list[bytes], bytes], retrievals: list[bytes]) -> None:
    """Answer for ever, each request with bytes that were made before."""
    searches, found = itertools.cycle(turns[0]), itertools.cycle(retrievals)

    async def generate_turn(request: web.Request) -> web.Response:
        ids = json.loads(await request.read())["input_ids"]
        body = next(searches) if len(ids) == prompt_length else turns[1]
        return web.Response(body=body, content_type="application/json")

    async def retrieve(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=next(found), content_type="application/json")

    async def run() -> None:
        application = web.Application()
        application.add_routes([web.post("/generate", generate_turn), web.post("/retrieve", retrieve)])
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


# --- The two sides ---


class Speed(NamedTuple):
    per_second: float
    """Trajectories."""
    cpu_ms: float
    """CPU time of this process for a trajectory, milliseconds."""


async def run_many(converse: Conversation, trajectories: int, concurrency: int) -> Speed:
    """Trajectories with that many in flight, once every connection is open."""
    await asyncio.gather(*map(converse, range(trajectories, trajectories + concurrency)))
    numbers = iter(range(trajectories))

    async def worker() -> None:
        for number in numbers:
            await converse(number)

    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return Speed(trajectories / seconds, 1000 * cpu_seconds / trajectories)


async def measure_hook(url: str, tokenizer: PreTrainedTokenizerBase, trajectories: int, concurrency: int) -> Speed:
    search_r1 = {"local": {"search_url": f"{url}/retrieve"}}
    args = SimpleNamespace(custom_config={"search_r1": search_r1}, rollout_max_context_len=4096)
    prompt_ids = tokenizer.encode(PROMPT)

    async def converse(number: int) -> None:
        sample = Sample(
            number, number, PROMPT, TokenTrace(list(prompt_ids)), label={"ground_truth": {"target": ["Paris"]}}
        )
        sample = await generate(args, sample, dict(PARAMS))
        assert sample.status == SampleStatus.COMPLETED, sample.error

    async with EngineClient([url], max_concurrency=concurrency, vocab_size=len(tokenizer)) as client:
        with use_rollout_context(RolloutContext(client, tokenizer)):
            return await run_many(converse, trajectories, concurrency)


class Json(NamedTuple):
    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


STANDARD = Json(lambda body: json.dumps(body, separators=(",", ":")).encode(), json.loads)
FAST = Json(orjson.dumps, orjson.loads)


async def measure_reference(
    url: str, first: list[int], second: list[int], library: Json, trajectories: int, concurrency: int
) -> Speed:
    """Only the HTTP: the same bodies, the answers parsed and left alone."""
    params = {**PARAMS, "stop": ["</search>", "</answer>"], **FIXED_SAMPLING_PARAMS}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:

        async def ask(path: str, body: dict[str, Any]) -> Any:
            async with session.post(f"{url}/{path}", data=library.dumps(body)) as response:
                return library.loads(await response.read())

        async def converse(number: int) -> None:
            await ask("generate", {"input_ids": first, "sampling_params": params, "return_logprob": True})
            await ask("retrieve", {"queries": [f"where is it {number}"], "topk": 3, "return_scores": True})
            await ask("generate", {"input_ids": second, "sampling_params": params, "return_logprob": True})

        return await run_many(converse, trajectories, concurrency)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=whole_number(), default=1000, help="trajectories of a trial [1000]")
    parser.add_argument("--concurrency", type=whole_number(), default=256, help="trajectories at the same time [256]")
    parser.add_argument("--group", type=whole_number(), default=8, help="trajectories that find equal passages [8]")
    parser.add_argument("--trials", type=whole_number(), default=7, help="trials of each formulation [7]")
    options = parser.parse_args()

    contents = read_contents(3000)
    tokenizer = train_tokenizer(contents)
    searches = 3 * options.trials * (options.trajectories + options.concurrency)  # three sides take them in turn
    turns = [f"{THINK}\n<search>where is it {number}</search>" for number in range(searches)]
    answer = f"{THINK}\n<answer>Paris</answer>"
    found = list(itertools.islice(different_hits(contents), 1 + searches // options.group))
    observation = format_observation([to_passage(hit) for hit in found[0]], tokenizer, 500)
    first = tokenizer.encode(PROMPT)
    second = first + tokenizer.encode(turns[0]) + observation

    bodies = [orjson.dumps({"result": [hits]}) for hits in found for _ in range(options.group)]
    ours, theirs = multiprocessing.Pipe()
    answers = [engine_answer(turn, tokenizer) for turn in turns], engine_answer(answer, tokenizer)
    server = multiprocessing.Process(target=serve, args=(theirs, len(first), answers, bodies), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    load = options.trajectories, options.concurrency
    relax_garbage_collector()
    trials, beside_fast = [], []
    for trial in range(options.trials):
        hook = asyncio.run(measure_hook(url, tokenizer, *load))
        reference = asyncio.run(measure_reference(url, first, second, STANDARD, *load))
        fast = asyncio.run(measure_reference(url, first, second, FAST, *load))
        trials.append((hook.per_second / reference.per_second, hook, reference))
        beside_fast.append(hook.per_second / fast.per_second)
        print(
            f"trial {trial}: hook {hook.per_second:.0f} trajectories/s ({hook.cpu_ms:.2f} ms CPU each), "
            f"reference {reference.per_second:.0f} ({reference.cpu_ms:.2f} ms), ratio {trials[-1][0]:.2f}; "
            f"with orjson {fast.per_second:.0f} ({fast.cpu_ms:.2f} ms), ratio {beside_fast[-1]:.2f}"
        )
    server.terminate()
    server.join()
    print(f"beside the reference with orjson: median ratio {statistics.median(beside_fast):.2f}")
    ratio, hook, reference = sorted(trials)[len(trials) // 2]
    result = {"name": "hook_overhead", "ratio": ratio, "ours": hook.per_second, "reference": reference.per_second}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
