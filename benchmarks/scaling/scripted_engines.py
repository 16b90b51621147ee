"""Engines that answer at once, or after the seconds that a turn takes, with bytes that were made before.

One process listens for all of them, each at a port of its own. A request that ends as a prompt does gets a turn that
searches, each time for something else; any other gets the answer. GET /report on any port says what was asked.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import orjson
from aiohttp import web
from transformers import PreTrainedTokenizerBase

THINK = f"<think>{'I need to find out where it is, and what else is known about it, before I can answer. ' * 3}</think>"


@dataclass(frozen=True)
class Script:
    """`prompt_end`: the last token ids of every prompt. `seconds`: of a turn, in the mean; they vary by half."""

    engines: int
    prompt_end: list[int]
    searches: list[bytes]
    answer: bytes
    seconds: float


def make_script(
    engines: int, prompt_end: list[int], queries: Sequence[str], tokenizer: PreTrainedTokenizerBase, seconds: float
) -> Script:
    turns = [engine_answer(f"{THINK}\n<search>{query}</search>", tokenizer) for query in queries]
    answer = engine_answer(f"{THINK}\n<answer>Paris</answer>", tokenizer)
    return Script(engines, prompt_end, turns, answer, seconds)


def engine_answer(text: str, tokenizer: PreTrainedTokenizerBase) -> bytes:
    """What SGLang answers for a turn of this text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    meta: dict[str, Any] = {
        "id": "0",
        "finish_reason": {"type": "stop", "matched": "</search>"},
        "prompt_tokens": 100,
        "completion_tokens": len(ids),
        "output_token_logprobs": [[-0.123456 - 0.001 * position, token, None] for position, token in enumerate(ids)],
        "weight_version": "1",
    }
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})


class ScriptedEngines:
    """The process, and the engines' `urls`; a context manager that ends it."""

    def __init__(self, script: Script) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(theirs, script), daemon=True)
        self._process.start()
        self.urls = [f"http://127.0.0.1:{port}" for port in ours.recv()]
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def __enter__(self) -> ScriptedEngines:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.join()


def _serve(pipe: Connection, script: Script) -> None:
    searches = itertools.cycle(script.searches)
    end = script.prompt_end
    draw = random.Random(1)
    counts = {"requests": 0, "now": 0, "most": 0}

    async def generate(request: web.Request) -> web.Response:
        ids = orjson.loads(await request.read())["input_ids"]
        body = next(searches) if ids[-len(end) :] == end else script.answer
        counts["requests"] += 1
        counts["now"] += 1
        counts["most"] = max(counts["most"], counts["now"])
        await asyncio.sleep(script.seconds * draw.uniform(0.5, 1.5))
        counts["now"] -= 1
        return web.Response(body=body, content_type="application/json")

    async def report(request: web.Request) -> web.Response:
        return web.json_response(counts | {"cpu": time.process_time()})

    async def run() -> None:
        application = web.Application(client_max_size=2**24)
        application.add_routes([web.post("/generate", generate), web.get("/report", report)])
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        for _ in range(script.engines):
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        pipe.send([address[1] for address in runner.addresses])
        await asyncio.Event().wait()

    asyncio.run(run())
