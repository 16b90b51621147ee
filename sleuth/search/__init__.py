"""The parts of a search environment that do not depend on a protocol or a backend."""

from sleuth.search.http import SearchError, request_text, shared_session, with_search_retries
from sleuth.search.observation import Passage, decode, encode, format_observation, to_passage
from sleuth.search.service import SearchService, SearchUnavailableError, drain_search_metrics

__all__ = [
    "Passage",
    "SearchError",
    "SearchService",
    "SearchUnavailableError",
    "decode",
    "drain_search_metrics",
    "encode",
    "format_observation",
    "request_text",
    "shared_session",
    "to_passage",
    "with_search_retries",
]
