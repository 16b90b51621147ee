"""Tool calls with a real engine and Qwen2.5's real template: what is stored is what the model's weights say.

A tiny model learns to call and to answer in some seconds, so that its turns and mistakes are real ones.
"""

from __future__ import annotations

import asyncio
import copy
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from generate_with_tools import TOOLS, generate, reward_func
from sleuth.chat_template import ToolTemplate
from sleuth.hooks import RolloutContext, use_rollout_context
from sleuth.rollout.engine_client import EngineClient
from sleuth.sample import Sample, TokenTrace
from sleuth.search import Passage
from sleuth.search.items import format_items
from sleuth.weight_sync.tensor import push_weights
from tests.conftest import RunningEngine
from tests.templates import FOLDER
from tests.test_generate_with_search_engine import largest_difference

pytestmark = pytest.mark.engine
CITIES = {"France": "Paris", "Japan": "Tokyo"}
INSTRUCTION = "Search."
SAMPLES, STEPS = 24, 90


async def find_city(query: str, topk: int) -> list[dict[str, str]]:
    return [{"title": country, "text": city} for country, city in CITIES.items() if country in query]


def lesson(country: str, tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """A conversation as it should go, and the labels of what the model says in it."""
    template = ToolTemplate(tokenizer, TOOLS, {"enable_thinking": False})
    call = f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{country}"}}}}\n</tool_call>'
    said = [[*tokenizer.encode(t), tokenizer.eos_token_id] for t in (call, f"Answer: {CITIES[country]}")]
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": country}]
    results = [format_items([Passage(country, CITIES[country])], tokenizer, 1024)]
    parts = [template.prompt(messages), said[0], template.between(results, said[0]), said[1]]
    labels = [part if i % 2 else [-100] * len(part) for i, part in enumerate(parts)]
    return torch.tensor([list(chain(*parts))]), torch.tensor([list(chain(*labels))])


def teach(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    torch.manual_seed(0)
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lessons = [lesson(country, tokenizer) for country in CITIES]
    for step in range(STEPS):
        ids, labels = lessons[step % len(lessons)]
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


async def hold(engine: RunningEngine, tokenizer: PreTrainedTokenizerBase, samples: list[Sample]) -> list[Sample]:
    config = {
        "search_r1": {"search_backend": f"{__name__}.find_city"},
        "search_tools": {"preset": "webagent", "max_trajectory_tokens": 1500, "instruction": INSTRUCTION},
    }
    args = SimpleNamespace(custom_config=config, rollout_max_context_len=1500)
    async with EngineClient([engine.url], max_concurrency=8, vocab_size=512) as client:
        with use_rollout_context(RolloutContext(client, tokenizer)):
            params = {"temperature": 1.0, "max_new_tokens": 80}
            done = await asyncio.gather(*(generate(args, sample, dict(params)) for sample in samples))
            for sample in done:
                sample.reward = (await reward_func(args, sample))["reward"]
    return done


def test_stored_log_probs_are_the_models(engine: RunningEngine) -> None:
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = (FOLDER / "qwen2.5.jinja").read_text("utf-8")
    model = teach(engine.model, tokenizer)
    push_weights([engine.url], model.state_dict().items(), "taught")
    countries = [list(CITIES)[i % 2] for i in range(SAMPLES)]
    prompts = [Sample(i, 0, country, TokenTrace([5]), label=CITIES[country]) for i, country in enumerate(countries)]
    samples = asyncio.run(hold(engine, tokenizer, prompts))

    assert sum(sample.rollout_metrics["searches"] > 0 for sample in samples) > SAMPLES / 2
    assert sum(sample.reward == 1.0 for sample in samples) > SAMPLES / 4
    assert {sample.weight_version for sample in samples} == {"taught"}
    assert largest_difference(samples, model) < 1e-4
