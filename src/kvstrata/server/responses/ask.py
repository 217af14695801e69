"""Translation of /v1/responses bodies to conversations: reads stored responses, and refuses fields that are not
supported."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from starlette.types import Scope

from kvstrata.errors import ContextTooLong, InvalidRequest, RequestError
from kvstrata.grammar.constraint import Constraint
from kvstrata.server.auth import salt_of
from kvstrata.server.conversation.body import read_body
from kvstrata.server.conversation.chat import Chat, ThinkingWanted, Wanted, pin_for_retention
from kvstrata.server.conversation.job import Job, chat_job
from kvstrata.server.conversation.wire import json_bytes
from kvstrata.server.responses.schema import ITEMS, MessageItem, ReferenceItem, ResponseAsked
from kvstrata.server.responses.stored import StoredResponse, StoredResponses
from kvstrata.server.responses.tools import IgnoredTools, Toolbox, choice_of, ignored_types, toolbox
from kvstrata.server.responses.turns import messages_of
from kvstrata.server.service import Service

LOGPROBS = "message.output_text.logprobs"  # a value of `include`
ENCRYPTED = "reasoning.encrypted_content"


@dataclass(frozen=True)
class Memory:
    """State that this API keeps between requests."""

    stored: StoredResponses
    ignored: IgnoredTools


@dataclass(frozen=True)
class Question:
    """A request, validated and translated. `job`: an error if the prompt does not fit the context."""

    id: str
    asked: ResponseAsked
    box: Toolbox
    job: Job | ContextTooLong
    salt: str
    items: bytes  # all input items, encoded for storage; empty: the response is not stored

    def stored(self, answer: Any) -> StoredResponse:
        output_ids = tuple(item["id"] for item in answer["output"])
        return StoredResponse(self.id, self.salt, json_bytes(answer), self.items, output_ids)


class Asking:
    """Callable that reads bodies, for `conversation.body.read`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __call__(self, service: Service, body: bytes, scope: Scope) -> Question:
        asked = read_body(ResponseAsked, body, service.max_items)
        _check(asked)
        box, items, num_before = understood(asked, self._memory.stored, salt_of(scope, asked.cache_salt))
        self._memory.ignored.note(ignored_types(asked.tools or ()))
        chat = conversation(asked, box, items, num_before)
        response_id = f"resp_{uuid.uuid4().hex}"
        job = _job(service, chat, scope, response_id)
        kept = _dumped(items) if asked.store is not False else b""
        return Question(response_id, asked, box, job, salt_of(scope, asked.cache_salt), kept)


def understood(asked: ResponseAsked, stored: StoredResponses, salt: str) -> tuple[Toolbox, list[Any], int]:
    """Return the tools, the items, and the number of items that come from earlier responses."""
    before = _history(asked.previous_response_id, stored, salt)
    items = [*before, *_given(asked, stored, salt)]
    return toolbox(asked.tools or ()), items, len(before)


def conversation(asked: ResponseAsked, box: Toolbox, items: Sequence[Any], num_before: int = 0) -> Chat:
    messages = messages_of(asked.instructions, items, box, num_before)
    if not messages:
        raise InvalidRequest("input: must not be empty.", param="input")
    offered, choice = choice_of(asked, box)
    reasoning = asked.reasoning
    return Chat(
        messages=messages,
        tools=offered.tools,
        choice=choice,
        thinking=ThinkingWanted(effort=reasoning.effort if reasoning else None),
        wanted=Wanted(
            sampling={"temperature": asked.temperature, "top_p": asked.top_p, "num_logprobs": _num_logprobs(asked)},
            max_tokens=asked.max_output_tokens,
            # Clients send the largest max_output_tokens of any model, so no memory is reserved for it.
            reserves=False,
            constraint=_constraint(asked),
            constraint_param="text.format",
            cache_salt=asked.cache_salt,
            cache_key=asked.prompt_cache_key,
        ),
        model=asked.model,
        pin=pin_for_retention(asked.prompt_cache_retention),
    )


def stored_items(response: StoredResponse) -> list[Any]:
    return ITEMS.validate_python(from_json(response.items))


def _job(service: Service, chat: Chat, scope: Scope, response_id: str) -> Job | ContextTooLong:
    try:
        return chat_job(service, chat, scope, response_id)
    except RequestError as error:
        if error.param == "messages":  # the name of the field in a conversation
            error.param = "input"
        if isinstance(error, ContextTooLong):
            return error
        raise


def _check(asked: ResponseAsked) -> None:
    if asked.background:
        raise InvalidRequest(
            "background: this server runs nothing in the background. Leave it out, and stream long replies.",
            param="background",
        )
    if asked.conversation is not None:
        raise InvalidRequest(
            "conversation: this server keeps no conversations. Use previous_response_id, or send all items.",
            param="conversation",
        )
    if asked.prompt is not None:
        raise InvalidRequest("prompt: this server keeps no prompts. Send instructions and input.", param="prompt")


def _history(response_id: str | None, stored: StoredResponses, salt: str) -> list[Any]:
    """Return the input and output items of an earlier response. Raises InvalidRequest if it is not found."""
    if not response_id:
        return []
    found = stored.find_to_continue(response_id, salt)
    if found is None:
        raise InvalidRequest(
            f"Previous response with id '{response_id[:80]}' not found. It may have been one of another key or "
            "cache_salt, sent with store = false, or dropped for newer ones: send all items instead.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [*stored_items(found), *_output(found)]


def _given(asked: ResponseAsked, stored: StoredResponses, salt: str) -> list[Any]:
    if asked.input is None:
        return []
    if isinstance(asked.input, str):
        return [MessageItem(role="user", content=asked.input)]
    return [
        _referred(item, stored, salt, f"input.{index}") if isinstance(item, ReferenceItem) else item
        for index, item in enumerate(asked.input)
    ]


def _referred(item: ReferenceItem, stored: StoredResponses, salt: str, where: str) -> Any:
    found = stored.find_with_item(item.id, salt)
    items = _output(found) if found is not None else []
    named = next((each for each in items if each.id == item.id), None)
    if named is None:
        raise InvalidRequest(
            f"Item with id '{item.id[:80]}' not found. Items are not kept when store is false: send the item itself.",
            param=where,
        )
    return named


def _output(response: StoredResponse) -> list[Any]:
    return ITEMS.validate_python(from_json(response.answer)["output"])


def _dumped(items: Sequence[Any]) -> bytes:
    """Encode items for storage. Items without an id get one, because the list of a response's input items shows ids."""
    named = [item if item.id else item.model_copy(update={"id": _item_id(item.type)}) for item in items]
    return json_bytes([item.model_dump(exclude_none=True) for item in named])


def _item_id(kind: str) -> str:
    prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
    return f"{prefixes.get(kind, 'item')}_{uuid.uuid4().hex}"


def _num_logprobs(asked: ResponseAsked) -> int | None:
    is_wanted = asked.top_logprobs or LOGPROBS in (asked.include or ())
    return (asked.top_logprobs or 0) if is_wanted else None


def _constraint(asked: ResponseAsked) -> Constraint | None:
    form = asked.text.format if asked.text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint.json_object()
    if form.schema_ is None:
        raise InvalidRequest("text.format: type json_schema needs a schema.", param="text.format.schema")
    return Constraint.json_schema(form.schema_, strict=bool(form.strict))
