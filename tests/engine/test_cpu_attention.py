"""The attention that replaces SGLang's on CPUs, in a real server: beside Hugging Face, tolerance 1e-4 nats."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from sleuth.engine.cpu_plugin import IN_PLACE
from sleuth.rollout.engine_client import EngineClient
from tests.conftest import RunningEngine

VOCABULARY = 400
"""Prompts have ids below; the model has 512."""
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12, "ignore_eos": True}


async def two_turns(
    client: EngineClient, prompt: list[int], more: list[int]
) -> tuple[list[int], list[tuple[int, float]]]:
    """All ids of a conversation of two turns, and (position, log-probability) of those that were sampled."""
    ids, sampled = list(prompt), []
    for observation in (more, []):
        generation = await client.generate(ids, SAMPLING)
        sampled += [(len(ids) + i, value) for i, value in enumerate(generation.log_probs)]
        ids += [*generation.ids, *observation]
    return ids, sampled


@pytest.mark.engine
def test_unequal_conversations_at_once_have_the_models_log_probs(engine: RunningEngine) -> None:
    """Lengths from 2 to 700, half of the prompts with a common beginning (cached), and second turns on top of first."""
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(5, VOCABULARY) for _ in range(count)]

    common = words(90)
    prompts = [(common if i % 2 else []) + words(rng.choice((2, 10, 50, 200, 600))) for i in range(24)]

    async def all_of_them() -> list[tuple[list[int], list[tuple[int, float]]]]:
        async with EngineClient([engine.url], max_concurrency=256, vocab_size=512) as client:
            return await asyncio.gather(*(two_turns(client, prompt, words(30)) for prompt in prompts))

    for ids, sampled in asyncio.run(all_of_them()):
        expected = engine.log_probs(ids)
        assert [value for _, value in sampled] == pytest.approx([expected[at - 1] for at, _ in sampled], abs=1e-4)


@pytest.mark.engine
def test_the_server_uses_it(engine: RunningEngine) -> None:
    """Else SGLang's own would pass the test above, many times slower."""
    assert IN_PLACE in engine.server.log_path.read_text(encoding="utf-8")
