"""Conversations with a real engine: what is stored is what the model's weights say, token by token.

A tiny model learns the protocol in a few seconds, so that its turns, searches and mistakes are real ones.
"""

from __future__ import annotations

import asyncio
import copy
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from generate_with_search import generate, reward_func
from sleuth.hooks import RolloutContext, use_rollout_context
from sleuth.rollout.engine_client import EngineClient
from sleuth.sample import Sample, TokenTrace
from sleuth.search import format_observation
from sleuth.weight_sync.tensor import push_weights
from tests.conftest import RunningEngine

pytestmark = pytest.mark.engine
CITIES = {"France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Japan": "Tokyo"}
TRAJECTORIES = 200
STEPS = 150


async def find_city(query: str, topk: int) -> list[dict[str, str]]:
    return [
        {"title": country, "text": f"{city} is the capital."} for country, city in CITIES.items() if country in query
    ]


def prompt(country: str) -> str:
    return f"capital of {country}?\n"


def lesson(country: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    found = asyncio.run(find_city(country, 3))
    parts = [
        f"{prompt(country)}<think> I </think><search> {country} </search>",
        f"<think> I </think><answer> {CITIES[country]} </answer>",
    ]
    first, second = (tokenizer.encode(part, add_special_tokens=False) for part in parts)
    return first + format_observation(found, tokenizer, 200) + second + [tokenizer.eos_token_id]


def teach(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A copy of the model that has seen the protocol: it mostly follows it, and errs now and then."""
    torch.manual_seed(0)
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lessons = [torch.tensor([lesson(country, tokenizer)]) for country in CITIES]
    for step in range(STEPS):
        ids = lessons[step % len(lessons)]
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


async def converse(engine: RunningEngine, samples: list[Sample]) -> list[Sample]:
    args = SimpleNamespace(
        custom_config={"search_r1": {"search_backend": f"{__name__}.find_city"}}, rollout_max_context_len=1500
    )
    params = {"temperature": 1.0, "max_new_tokens": 60}
    async with EngineClient([engine.url], max_concurrency=32, vocab_size=512) as client:
        with use_rollout_context(RolloutContext(client, engine.tokenizer)):
            done = await asyncio.gather(*(generate(args, sample, dict(params)) for sample in samples))
            for sample in done:
                sample.reward = (await reward_func(args, sample))["reward"]
    return done


def largest_difference(samples: list[Sample], model: PreTrainedModel, shift: int = 0) -> float:
    """Between the stored log-probabilities and a plain forward over the stored ids, on the model's tokens, in nats."""
    largest = 0.0
    for sample in samples:
        trace = sample.trace
        ids = torch.tensor([trace.token_ids])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
        expected = scores.gather(1, ids[0, 1:, None])[len(trace.prompt_ids) - 1 :, 0].roll(shift)
        mask = torch.tensor(trace.loss_mask, dtype=torch.bool)
        difference = (expected - torch.tensor(trace.log_probs))[mask].abs()
        largest = max(largest, difference.max().item())
    return largest


def test_stored_log_probs_are_the_models(engine: RunningEngine) -> None:
    model = teach(engine.model, engine.tokenizer)
    push_weights([engine.url], model.state_dict().items(), "taught")
    rng = random.Random(0)
    samples = []
    for index in range(TRAJECTORIES):
        country = rng.choice(list(CITIES))
        ids = engine.tokenizer.encode(prompt(country), add_special_tokens=False)
        samples.append(Sample(index, 0, prompt(country), TokenTrace(ids), label=CITIES[country]))
    samples = asyncio.run(converse(engine, samples))

    searched = [sample for sample in samples if sample.rollout_metrics["searches"]]
    assert len(searched) > TRAJECTORIES / 2
    assert sum(sample.reward == 1.0 for sample in samples) > TRAJECTORIES / 10
    assert {sample.weight_version for sample in samples} == {"taught"}
    assert largest_difference(samples, model) < 1e-4
    assert largest_difference(samples, model, shift=1) > 1.0
