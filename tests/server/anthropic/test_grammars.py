"""The Messages API before a model that writes nonsense: what a grammar makes of it, and who is let in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlock, ToolUseBlock

from tests.agents.forced import forced_model
from tests.server.anthropic.conftest import client_of
from tests.support.servers import Served, running

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ASKED: Any = {"model": "claude-x", "max_tokens": 300, "messages": [{"role": "user", "content": "hello"}]}
TOOLS: Any = [
    {"name": "look", "input_schema": SCHEMA},
    {"name": "listen", "input_schema": SCHEMA},
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    with running(forced_model(), api_key=["secret"], options={"http": {"max_body_bytes": 3000}}) as one:
        yield one


@pytest.fixture(scope="module")
def friend(guarded: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(guarded, "secret") as one:
        yield one


def follows_schema(given: Any) -> bool:
    return set(given) == {"a", "b"} and given["a"] in ("x", "y") and isinstance(given["b"], bool)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_must_follow_a_schema(friend: anthropic.Anthropic, stream: bool) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    if stream:
        with friend.messages.stream(**ASKED, output_config=form) as told:
            message = told.get_final_message()
    else:
        message = friend.messages.create(**ASKED, output_config=form)
    (block,) = message.content
    assert isinstance(block, TextBlock)
    assert follows_schema(json.loads(block.text))
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("choice", "names"), [({"type": "any"}, {"look", "listen"}), ({"type": "tool", "name": "listen"}, {"listen"})]
)
def test_a_tool_that_must_be_called(friend: anthropic.Anthropic, choice: Any, names: set[str]) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    (block,) = friend.messages.create(**ASKED, tools=TOOLS, tool_choice=choice).content
    assert isinstance(block, ToolUseBlock)
    assert block.name in names
    assert follows_schema(block.input)


def test_who_has_no_key_is_told_so(guarded: Served) -> None:
    with client_of(guarded, "wrong") as stranger, pytest.raises(anthropic.AuthenticationError) as refused:
        stranger.messages.create(**ASKED)
    body: Any = refused.value.body
    assert body["error"]["type"] == "authentication_error"


def test_a_body_that_is_too_large(friend: anthropic.Anthropic) -> None:
    long: Any = {"role": "user", "content": "x" * 4000}
    with pytest.raises(anthropic.RequestTooLargeError) as refused:
        friend.messages.count_tokens(model="claude-x", messages=[long])
    body: Any = refused.value.body
    assert body["error"]["type"] == "request_too_large"
