"""Every error of the Messages API's paths is in its shape, from whichever layer it comes; and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from kvstrata import errors
from kvstrata.server.anthropic.response import messages_error
from tests.agents.forced import CONTEXT_TOKENS, Forced

USER: Any = {"role": "user", "content": "hello"}
ASKED: Any = {"model": "claude-x", "max_tokens": 5, "messages": [USER]}
PATHS = ["/v1/messages", "/v1/messages/count_tokens"]


def shaped(answer: Any, status: int, kind: str) -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body == {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}
    return body["error"]["message"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InvalidRequest("x"), "invalid_request_error"),
        (errors.Unauthorized("x"), "authentication_error"),
        (errors.Forbidden("x"), "permission_error"),
        (errors.ModelNotFound("x"), "not_found_error"),
        (errors.RequestTimeout("x"), "invalid_request_error"),
        (errors.BodyTooLarge("x"), "request_too_large"),
        (errors.QueueFull("x"), "rate_limit_error"),
        (errors.ReplyFailed("x"), "api_error"),
        (errors.Unavailable("x"), "overloaded_error"),
    ],
)
def test_each_error_has_its_type(error: errors.RequestError, kind: str) -> None:
    assert messages_error(error) == {"type": "error", "error": {"type": kind, "message": "x"}}


def test_a_prompt_that_no_memory_holds_is_too_long_as_well() -> None:
    assert messages_error(errors.NeverFits("x"))["error"]["message"] == "prompt is too long: x"


BAD: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "%%%"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "unheard_of"}]}]},
    {"messages": [USER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"tools": [{"name": "x"}]},
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "tool", "name": "x"}},
    {"system": [{"type": "image"}]},
    {"system": 5},
    {"thinking": "yes"},
]
BAD_REPLIES: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": "5"},
    {"temperature": -1},
    {"stop_sequences": [""]},
    {"messages": [USER, {"role": "assistant", "content": "Hel"}]},
    {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
    {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/$defs/none"}}}},
]


@pytest.mark.parametrize("fields", BAD)
@pytest.mark.parametrize("path", PATHS)
def test_bad_bodies(forced: Forced, path: str, fields: dict[str, Any]) -> None:
    with forced.served.http() as http:
        body = json.dumps({**ASKED, **fields})
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert shaped(answer, 400, "invalid_request_error")


@pytest.mark.parametrize("fields", BAD_REPLIES)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_wishes_for_replies(forced: Forced, fields: dict[str, Any], stream: bool) -> None:
    with forced.served.http() as http:
        answer = http.post("/v1/messages", json={**ASKED, "stream": stream, **fields})
    assert shaped(answer, 400, "invalid_request_error")


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_no_json(forced: Forced, path: str) -> None:
    with forced.served.http() as http:
        kind = {"content-type": "application/json"}
        shaped(http.post(path, content=b"{", headers=kind), 400, "invalid_request_error")
        shaped(http.post(path, content=b"{}", headers={"content-type": "text/plain"}), 400, "invalid_request_error")
        shaped(http.post(path, content=b"[" * 100_000, headers=kind), 400, "invalid_request_error")


def test_ten_thousand_tools_are_no_trouble(claude: anthropic.Anthropic) -> None:
    tools: Any = [{"name": f"t{place}", "input_schema": {"type": "object"}} for place in range(10_000)]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(**ASKED, tools=tools)
    assert claude.messages.create(**ASKED).content


def test_paths_and_methods_that_do_not_exist(forced: Forced) -> None:
    with forced.served.http() as http:
        shaped(http.post("/v1/messages/batches", json={}), 404, "not_found_error")
        shaped(http.get("/v1/messages"), 405, "invalid_request_error")


def test_a_prompt_that_is_too_long(claude: anthropic.Anthropic) -> None:
    """Claude Code shortens its chat when it reads these words."""
    long = {**ASKED, "messages": [{"role": "user", "content": "a b " * CONTEXT_TOKENS}]}
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(**long)
    body: Any = refused.value.body
    start, _, rest = body["error"]["message"].partition(" tokens > ")
    assert start.startswith("prompt is too long: ")
    assert int(start.removeprefix("prompt is too long: ")) > int(rest.partition(" maximum")[0])


def test_errors_as_the_client_raises_them(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="gpt-9"):
        claude.messages.create(**{**ASKED, "model": "gpt-9"})
    with pytest.raises(anthropic.NotFoundError, match="gpt-9"):
        claude.messages.count_tokens(model="gpt-9", messages=[USER])
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with (
        pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0: images are not supported"),
        claude.messages.stream(**{**ASKED, "messages": [{"role": "user", "content": [image]}]}),
    ):
        pass
    assert claude.messages.create(**ASKED).content
