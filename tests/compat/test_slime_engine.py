"""The example written for slime with a real engine: what is stored is what the weights say."""

from __future__ import annotations

import asyncio

import pytest

from sleuth.hooks import RolloutContext, use_rollout_context
from sleuth.rollout.engine_client import EngineClient
from sleuth.rollout.hook_runner import HookRunner, load_hooks
from sleuth.rollout.loop import rollout_parameters
from sleuth.sample import Sample, TokenTrace
from sleuth.weight_sync.tensor import push_weights
from tests.compat.test_slime import EXAMPLE, retriever, run_args
from tests.conftest import RunningEngine
from tests.scripted import serving
from tests.test_generate_with_search_engine import CITIES, largest_difference, prompt, teach

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("with_ids", [True, False])
def test_the_example_with_a_real_engine(engine: RunningEngine, with_ids: bool):
    """What is stored is what the weights say; with text alone, too, as far as the ids are the hook's own."""
    model = teach(engine.model, engine.tokenizer)
    push_weights([engine.url], model.state_dict().items(), "taught")
    args = run_args(**EXAMPLE, custom_config={"custom": {"return_logprob": with_ids}}, rollout_max_context_len=600)
    countries = [list(CITIES)[i % len(CITIES)] for i in range(24)]

    async def run() -> list[Sample]:
        async with (
            serving(retriever, "/retrieve") as url,
            EngineClient([engine.url], max_concurrency=8, vocab_size=512) as client,
        ):
            settings = args.model_copy(update={"search_url": url, "rollout_max_response_len": 60})
            runner = HookRunner(settings, load_hooks(settings))
            with use_rollout_context(RolloutContext(client, engine.tokenizer, 512)):
                ids = [engine.tokenizer.encode(prompt(country), add_special_tokens=False) for country in countries]
                new = [
                    Sample(i, i, prompt(country), TokenTrace(ids[i]), label=CITIES[country])
                    for i, country in enumerate(countries)
                ]
                return await asyncio.gather(*(runner.run(s, rollout_parameters(settings), False) for s in new))

    samples = asyncio.run(run())
    assert [sample.error for sample in samples if sample.error] == []
    assert any(len(sample.trace.segments) == 3 for sample in samples)
    if with_ids:
        assert largest_difference(samples, model) < 1e-4
        assert all(sample.rollout_metrics["drifted_tokens"] == 0 for sample in samples)
    else:
        exact = [sample for sample in samples if sample.rollout_metrics["drifted_tokens"] == 0]
        assert largest_difference(exact, model) < 1e-4
