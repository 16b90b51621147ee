"""What keeping a trajectory on one engine saves: the share of prompt tokens that the engines' prefix caches hold.

    python -m benchmarks.prefix_cache [--groups 8] [--samples 8] [--turns 4] [--engines 2] [--model data/demo/model]

Real engines, and trajectories as a search hook makes them: a prompt of an instruction that all share and a question of
the group's own, then turns of a few generated tokens and an observation of 64. The reference sends each request to the
next engine in turn; a third way is SGLang's router (--router of a run). All begin with empty caches. The last line is
one JSON object: shares of prompt tokens served from the caches, ratio of the tokens that remain to be computed
(reference / ours), and the seconds of each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.options import whole_number
from sleuth.engine.key import engine_session
from sleuth.engine.router import RouterProcess
from sleuth.engine.server import EngineConfig, EngineServer
from sleuth.rollout.engine_client import EngineClient, embedding_size
from sleuth.rollout.routing import Router, one_trajectory

INSTRUCTION, QUESTION, OBSERVATION, GENERATED = 160, 24, 64, 16  # tokens
PLACES = 64


class InTurn(Router):
    """The reference: whatever a request holds, it goes to the next engine."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(urls, slack=1)
        self._next = itertools.cycle(urls)

    @contextmanager
    def place(self, input_ids: Sequence[int]) -> Iterator[str]:
        yield next(self._next)


async def trajectory(client: EngineClient, ids: list[int], turns: int, rng: random.Random) -> None:
    params = {"temperature": 1.0, "max_new_tokens": GENERATED, "ignore_eos": True}
    with one_trajectory():
        for _ in range(turns):
            generation = await client.generate(ids, params)
            await asyncio.sleep(rng.uniform(0.0, 0.05))  # the search
            ids = ids + generation.ids + random_ids(rng, OBSERVATION)


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 1000) for _ in range(count)]


async def measure(
    urls: list[str], args: argparse.Namespace, router: Router | None = None, router_url: str | None = None
) -> dict[str, float]:
    for url in urls:
        engine_session().post(f"{url}/flush_cache", timeout=60).raise_for_status()
    rng = random.Random(0)
    instruction = random_ids(rng, INSTRUCTION)
    prompts = [instruction + random_ids(rng, QUESTION) for _ in range(args.groups)]
    vocabulary = embedding_size(args.model)
    async with EngineClient(urls, max_concurrency=PLACES, vocab_size=vocabulary, router_url=router_url) as client:
        if router is not None:
            client._router = router
        start = time.perf_counter()
        seeds = itertools.count()
        await asyncio.gather(
            *(
                trajectory(client, prompt, args.turns, random.Random(next(seeds)))
                for prompt in prompts
                for _ in range(args.samples)
            )
        )
        return {"share": client.take_cached_share(), "seconds": time.perf_counter() - start}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=whole_number(), default=8)
    parser.add_argument("--samples", type=whole_number(), default=8, help="trajectories of a group")
    parser.add_argument("--turns", type=whole_number(), default=4)
    parser.add_argument("--engines", type=whole_number(), default=2)
    parser.add_argument("--model", type=Path, default=Path("data/demo/model"))
    return parser.parse_args()


def main() -> None:
    args = parse_options()
    with ExitStack() as stack:
        servers = [EngineServer(EngineConfig(args.model, dtype="float32")) for _ in range(args.engines)]
        urls = [stack.enter_context(server).url for server in servers]
        reference = asyncio.run(measure(urls, args, InTurn(urls)))
        ours = asyncio.run(measure(urls, args))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        with RouterProcess(urls, Path(folder) / "router.log") as process:
            routed = asyncio.run(measure(urls, args, router_url=process.url))
    for name, found in (("in turn", reference), ("by trajectory", ours), ("SGLang's router", routed)):
        print(f"{name:16s} {found['share']:6.1%} of prompt tokens from the caches, {found['seconds']:6.1f} s")
    result: dict[str, Any] = {"name": "prefix_cache", "engines": args.engines, "groups": args.groups}
    result |= {"samples": args.samples, "turns": args.turns, "ours": ours, "reference": reference, "router": routed}
    print(json.dumps(result | {"ratio": round((1 - reference["share"]) / (1 - ours["share"]), 2)}))


if __name__ == "__main__":
    main()
