"""The metrics that `GET /metrics` returns, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The counters and histograms of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "retrieval_requests", "Answers, by path and status", ["path", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "retrieval_request_seconds", "From a search's last byte to its answer", registry=registry, buckets=SECONDS
        )
        self.cache_hits = Counter("retrieval_cache_hits", "Queries answered from the cache", registry=registry)
        self.cache_misses = Counter("retrieval_cache_misses", "Queries that were not in the cache", registry=registry)
        self.joined = Counter("retrieval_joined", "Queries that joined the same one under way", registry=registry)
        self.abandoned = Counter(
            "retrieval_abandoned", "Queries not searched because their clients had gone", registry=registry
        )
        self.failures = Counter("retrieval_batch_failures", "Batches whose search failed", registry=registry)
        self.batch_size = Histogram(
            "retrieval_batch_size", "Queries searched together", registry=registry, buckets=BATCH_SIZES
        )
        self.queue_seconds = Histogram(
            "retrieval_queue_seconds", "Wait of a query for its batch", registry=registry, buckets=SECONDS
        )
        self.encode_seconds = Histogram(
            "retrieval_encode_seconds", "Encoding of a batch", registry=registry, buckets=SECONDS
        )
        self.search_seconds = Histogram(
            "retrieval_search_seconds", "Search of a batch in the index", registry=registry, buckets=SECONDS
        )
        self.fetch_seconds = Histogram(
            "retrieval_fetch_seconds", "Reading of a batch's passages", registry=registry, buckets=SECONDS
        )
        self._queue_length = Gauge("retrieval_queue_length", "Queries that wait for a batch", registry=registry)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Call `length()` for the length of the queue whenever the metrics are read."""
        self._queue_length.set_function(length)

    def text(self) -> bytes:
        return generate_latest(self.registry)
