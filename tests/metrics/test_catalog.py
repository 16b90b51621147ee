import asyncio

from sleuth.metrics.catalog import ALIASES, CATALOG, Metric, describe, with_aliases
from sleuth.metrics.console import EVALUATION_FIELDS, STEP_FIELDS
from sleuth.metrics.rollout_metrics import evaluation_metrics, rollout_metrics
from sleuth.sample import SampleStatus
from sleuth.search import SearchService, drain_search_metrics
from tests.metrics.samples import make_sample


def test_every_metric_of_samples_has_its_entry():
    samples = [make_sample(components={"exact_match": 1.0}, reported={"searches": 1.0}, source="nq", version="3")]
    for name in rollout_metrics(samples) | evaluation_metrics(samples, "demo/t1.0"):
        metric = describe(name)
        assert metric is not None, name
        assert metric.name not in ("rollout/<name>", "reward/<component>"), f"{name} has no entry of its own"


def test_every_metric_of_searches_has_its_entry():
    async def found(query):
        return ["text"]

    async def search():
        await SearchService(found, concurrency=1).search("query")

    drain_search_metrics()
    asyncio.run(search())
    names = drain_search_metrics()
    assert "search/latency_p95" in names
    assert all(describe(name) for name in names), names


def test_every_number_of_a_console_line_has_its_entry():
    for _, name, _ in STEP_FIELDS:
        assert describe(name) is not None, name
    for _, name, _ in EVALUATION_FIELDS:
        assert describe(f"eval/demo/greedy/{name}") is not None, name


def test_names_are_listed_once():
    names = [metric.name for metrics in CATALOG.values() for metric in metrics]
    assert len(names) == len(set(names))


def test_other_systems_find_the_names_that_they_know():
    values = {"reward/exact_match": 0.5, "rollout/searches": 1.5, "train/loss_tokens": 100.0, "train/loss": 0.1}
    evaluated = {"eval/a/greedy/reward": 0.25, "eval/a/t1.0/reward": 0.75}
    parts = {"eval/a/greedy/source/nq/reward": 9.0, "eval/a/greedy/macro/reward": 9.0}
    logged = with_aliases(values | evaluated | parts)
    assert {name: logged[name] for name in logged.keys() - values.keys() - evaluated.keys() - parts.keys()} == {
        "reward/correct": 0.5,
        "rollout/search_calls": 1.5,
        "train/loss_tokens_per_rollout_batch": 100.0,
        "validation_reward/_mean": 0.5,
    }
    assert set(values) < set(logged)
    assert with_aliases({}) == {}


def test_an_alias_is_no_name_of_another_metric():
    names = {metric.name for metrics in CATALOG.values() for metric in metrics}
    assert not names & set(ALIASES.values())
    assert len(set(ALIASES.values())) == len(ALIASES)


def test_placeholders_match_a_word_of_the_run_and_nothing_empty():
    metric = Metric("eval/<name>/em", "", "")
    assert metric.matches("eval/demo/greedy/em")
    assert not metric.matches("eval//em")
    assert not metric.matches("eval/demo/emu")


def test_statuses_are_listed_in_full():
    described = describe("rollout/status/failed")
    assert described is not None
    assert all(status in described.meaning for status in SampleStatus)
