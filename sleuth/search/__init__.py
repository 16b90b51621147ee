"""The parts of searching that depend neither on a tag protocol nor on a backend."""

from sleuth.search.http import (
    QueryError,
    SearchError,
    clean_query,
    is_query_fault,
    request_text,
    shared_session,
    with_search_retries,
)
from sleuth.search.observation import Passage, format_observation, to_passage
from sleuth.search.service import (
    Backend,
    SearchService,
    SearchUnavailableError,
    ask_test_question,
    drain_search_metrics,
    guarded_backend,
    shared_service,
)

__all__ = [
    "Backend",
    "Passage",
    "QueryError",
    "SearchError",
    "SearchService",
    "SearchUnavailableError",
    "ask_test_question",
    "clean_query",
    "drain_search_metrics",
    "format_observation",
    "guarded_backend",
    "is_query_fault",
    "request_text",
    "shared_service",
    "shared_session",
    "to_passage",
    "with_search_retries",
]
