"""Hooks that take one thing away from the demo's training. `catalog.py` says which control uses which.

Evaluation goes through the reward hooks and the search too: what they change is changed there as well. The shares that
controls are judged by, exact match and searches, are left as they are.
"""

from __future__ import annotations

import random
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import generate_with_search
from local_dense_retriever.corpus import read_corpus
from sleuth.sample import Sample
from sleuth.search.observation import Passage, to_passage

CORPUS = Path(__file__).resolve().parents[2] / "data/demo/corpus.jsonl.gz"


async def format_reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """1 for valid format, whatever the answer; the components, exact match among them, stay those of the demo."""
    components = await generate_with_search.reward_func(args, sample, **kwargs)
    return components | {"reward": components["valid_format"]}


async def unmasked_reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """The demo's reward; then every token of the response counts as the model's own, so that passages are trained on.

    The engine gave no log-probabilities for observations: they stay 0.0. With one optimizer step for each rollout the
    loss takes the trainer's own, and only the metrics that compare engine and trainer are spoiled.
    """
    components = await generate_with_search.reward_func(args, sample, **kwargs)
    sample.trace.loss_mask = [1] * len(sample.trace.loss_mask)
    return components


def shuffled_rewards(args: Any, group: list[Sample]) -> bool:
    """A filter that keeps every group, but deals its rewards out again at random among its samples.

    Advantages have the same sizes as before and say nothing about who earned them. Evaluations are not filtered.
    """
    rewards = [sample.reward for sample in group]
    seed = [getattr(args, "seed", 0), *(id_ for sample in group for id_ in sample.trace.response_ids)]
    random.Random(zlib.crc32(repr(seed).encode())).shuffle(rewards)
    for sample, reward in zip(group, rewards, strict=True):
        sample.reward = reward
    return True


async def unrelated_search(query: str, topk: int) -> list[Passage]:
    """Passages of the corpus that have nothing to do with the query, but are always the same ones for it."""
    chosen = random.Random(zlib.crc32(query.encode()))
    return chosen.sample(_passages(), topk)


@cache
def _passages() -> list[Passage]:
    return [to_passage(passage) for passage in read_corpus(CORPUS)]
