"""Schemathesis against the OpenAPI document: no 5xx, no status, header or shape that it does not name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.servers import Served

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
OLDER = ("n", "tools", "tool_choice", "response_format", "functions", "function_call", "audio", "web_search_options",
         "echo", "suffix", "best_of", "stream_options", "logit_bias")  # fmt: skip
REFUSED = {
    "/v1/chat/completions": OLDER,
    "/v1/completions": OLDER,
    "/v1/messages": ("tools", "tool_choice", "output_config", "output_format"),
    "/v1/responses": ("background", "conversation", "prompt", "previous_response_id", "tool_choice", "text"),
}
SHORT = {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 1}
FEW = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@pytest.fixture(scope="module")
def api(served: Served) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def try_operation(operation: Any, change: Callable[[Any], Any] = lambda body: body) -> None:
    modes = st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE])

    @FEW
    @given(case=modes.flatmap(lambda mode: operation.as_strategy(generation_mode=mode)))
    def send(case: schemathesis.Case) -> None:
        case.body = change(case.body)
        case.call_and_validate(checks=list(CHECKS))

    send()


PATHS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}", "DELETE"),
    ("/v1/responses/{response_id}/input_items", "GET"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/cache/usage", "GET"),
    ("/cache/history", "GET"),
    ("/cache/conversations", "GET"),
    ("/cache/conversations/{id}", "DELETE"),
    ("/cache/conversations/{id}/pin", "POST"),
    ("/cache/conversations/{id}/unpin", "POST"),
    ("/cache/sessions", "GET"),
    ("/cache/sessions/{session_id}", "GET"),
    ("/cache/explain", "POST"),
    ("/cache/clear", "POST"),
    ("/cache/pin", "POST"),
    ("/cache/unpin", "POST"),
    ("/cache/requantize", "POST"),
    ("/cache/requantize", "GET"),
    ("/cache/requantize", "DELETE"),
    ("/cache/sessions/{id}/export", "GET"),
    ("/cache/import", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/props", "GET"),
]


def test_every_operation_is_tried(api: Any) -> None:
    documented = {(path, method.upper()) for path, methods in api.raw_schema["paths"].items() for method in methods}
    assert documented == set(PATHS)


@pytest.mark.parametrize(("path", "method"), PATHS)
def test_whatever_is_sent(api: Any, path: str, method: str) -> None:
    try_operation(api[path][method], short_without_a_model)


def short_without_a_model(body: Any) -> Any:
    """Any other model is 404, but a body without one is answered: at the context's length, unless it says less."""
    asks = {"prompt", "messages", "input", "instructions"}
    is_answered = isinstance(body, dict) and asks & set(body) and not body.get("model")
    return {**body, **SHORT} if is_answered else body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_whatever_is_sent_to_the_model_that_is_there(api: Any, served: Served, path: str) -> None:
    """Random names are all 404; with the right one, a short reply and nothing that is refused it goes all the way."""

    def with_model(body: Any) -> Any:
        fixed = {"model": served.name, **SHORT, **dict.fromkeys(REFUSED[path])}
        return {**body, **fixed} if isinstance(body, dict) else body

    try_operation(api[path]["POST"], with_model)
