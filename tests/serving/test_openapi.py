"""The OpenAPI description is true: requests made from it, good and bad ones, are answered as it says."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from tests.serving.live import Live

from baton.serving.openapi import description

pytestmark = pytest.mark.serve

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
NUM_EXAMPLES = 40
"""Of each operation: every one is a request to a model."""


PATHS = description()["paths"]
GOOD = [(path, method) for path, methods in PATHS.items() for method in methods if path != "/drain"]
BAD = [(path, method) for path, method in GOOD if method == "post" or path == "/v1/timelines/{id}"]
"""Those of which something is read that can be wrong."""


@pytest.fixture(scope="module")
def schema(served: Live):
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json", timeout=300)


def hold(operation: Any, mode: GenerationMode) -> None:
    """Sends requests of one kind, and holds the answers against the description."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    def holds(case: schemathesis.Case) -> None:
        response = case.call(timeout=300)
        if "text/event-stream" not in response.headers["content-type"]:
            case.validate_response(response, checks=CHECKS)

    holds()


@pytest.mark.parametrize(("path", "method"), GOOD)
def test_good_requests_are_answered_as_described(schema, path: str, method: str):
    hold(schema[path][method], GenerationMode.POSITIVE)


@pytest.mark.parametrize(("path", "method"), BAD)
def test_bad_requests_are_refused_as_described(schema, path: str, method: str):
    hold(schema[path][method], GenerationMode.NEGATIVE)


def wrong_answer(found: dict[str, Any]) -> None:
    found["components"]["schemas"]["ModelCard"]["properties"]["created"] = {"type": "string"}


def wrong_status(found: dict[str, Any]) -> None:
    del found["paths"]["/v1/models"]["get"]["responses"]["200"]


@pytest.mark.parametrize("change", [wrong_answer, wrong_status])
def test_a_description_that_is_not_true_is_found_out(served: Live, change):
    told = served.ask("/openapi.json").json
    change(told)
    wrong = schemathesis.openapi.from_dict(told)
    wrong.config.update(base_url=served.url)
    with pytest.raises(FailureGroup):
        hold(wrong["/v1/models"]["get"], GenerationMode.POSITIVE)
