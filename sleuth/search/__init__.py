"""The parts of a search environment that do not depend on a protocol or a backend."""

from sleuth.search.http import SearchError, check_http_url, request_text, shared_session, with_search_retries
from sleuth.search.observation import Passage, format_observation, to_passage
from sleuth.search.service import (
    SearchService,
    SearchUnavailableError,
    drain_search_metrics,
    guarded_backend,
    shared_service,
)

__all__ = [
    "Passage",
    "SearchError",
    "SearchService",
    "SearchUnavailableError",
    "check_http_url",
    "drain_search_metrics",
    "format_observation",
    "guarded_backend",
    "request_text",
    "shared_service",
    "shared_session",
    "to_passage",
    "with_search_retries",
]
