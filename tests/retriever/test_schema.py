"""The OpenAPI document against the server, by schemathesis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from local_dense_retriever.app import create_app
from local_dense_retriever.batching import BatchingConfig
from tests.retriever.scripted import ScriptedRetriever, fetch, serving

schema = schemathesis.openapi.from_dict(create_app(ScriptedRetriever(), fetch, 3, BatchingConfig()).openapi())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(ScriptedRetriever()) as url:
        yield url


@schema.parametrize()
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_server_does_as_its_document_says(case: schemathesis.Case, url: str) -> None:
    case.call_and_validate(base_url=url)
