import asyncio

from sleuth.metrics.catalog import CATALOG, Metric, describe
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


def test_placeholders_match_a_word_of_the_run_and_nothing_empty():
    metric = Metric("eval/<name>/em", "", "")
    assert metric.matches("eval/demo/greedy/em")
    assert not metric.matches("eval//em")
    assert not metric.matches("eval/demo/emu")


def test_statuses_are_listed_in_full():
    described = describe("rollout/status/failed")
    assert described is not None
    assert all(status in described.meaning for status in SampleStatus)
