"""Error responses in the format of the Messages API: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.errors import ContextTooLong, NeverFits, RequestError
from kvstrata.server.anthropic.answers import MessagesErrorAnswer
from kvstrata.server.errors import DESCRIPTIONS, documented

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def messages_shape(error: RequestError) -> dict[str, Any]:
    # An unknown path is reported as InvalidRequest with this code.
    kind = "not_found_error" if error.code == "not_found" else TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def messages_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses for the OpenAPI document."""
    return {
        status: {"model": MessagesErrorAnswer, "description": DESCRIPTIONS[status]} for status in documented(statuses)
    }


def _message(error: RequestError) -> str:
    """Return the error text. Claude Code looks for the words "prompt is too long" and then compacts the chat by
    itself."""
    if isinstance(error, ContextTooLong) and error.num_tokens:
        return f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum. {error.message}"
    if isinstance(error, ContextTooLong | NeverFits):
        return f"prompt is too long: {error.message}"
    return error.message
