"""Responses of the Messages API: content blocks as events or as one message, and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from kvstrata.engine.request import TokenLogprob, TokenUsage
from kvstrata.errors import ContextTooLong, NeverFits, RequestError
from kvstrata.server.anthropic.schema import (
    BlockResponse,
    MessagesErrorResponse,
    MessagesResponse,
    StopReason,
    message_usage,
)
from kvstrata.server.chat.writer import ChoiceEnd, EventStreamFormat, JsonEvent, StreamStart, encode_sse
from kvstrata.server.http.errors import DESCRIPTIONS, documented
from kvstrata.text.reply_events import (
    ReplyEvent,
    ReplyText,
    ReplyThinking,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# Clients require a signature and send it back; it proves nothing.
SIGNATURE = "kvstrata"
PING = JsonEvent({"type": "ping"}, "ping")


def messages_error(error: RequestError) -> dict[str, Any]:
    # An unknown path is reported as InvalidRequest with this code.
    kind = "not_found_error" if error.code == "not_found" else TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def messages_error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses for the OpenAPI document."""
    return {
        status: {"model": MessagesErrorResponse, "description": DESCRIPTIONS[status]} for status in documented(statuses)
    }


def _message(error: RequestError) -> str:
    """Return the error text. Claude Code looks for the words "prompt is too long" and then compacts the chat by
    itself."""
    if isinstance(error, ContextTooLong) and error.num_tokens:
        return f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum. {error.message}"
    if isinstance(error, ContextTooLong | NeverFits):
        return f"prompt is too long: {error.message}"
    return error.message


@dataclass
class ContentBlock:
    """A content block of the message, as written so far. `pieces`: fragments of the text, thinking or arguments."""

    kind: Literal["text", "thinking", "tool_use"]
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        return "".join(self.pieces)

    def opening(self) -> dict[str, Any]:
        """Return the block as content_block_start shows it, still empty."""
        if self.kind == "text":
            return {"type": "text", "text": ""}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}

    def delta(self, piece: str) -> dict[str, Any]:
        if self.kind == "text":
            return {"type": "text_delta", "text": piece}
        if self.kind == "thinking":
            return {"type": "thinking_delta", "thinking": piece}
        return {"type": "input_json_delta", "partial_json": piece}

    def whole(self, *, is_cut: bool = False) -> BlockResponse:
        """Return the finished block. `is_cut`: the reply ended inside it; a call keeps its complete arguments."""
        if self.kind == "text":
            return {"type": "text", "text": self.said}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": self.said, "signature": SIGNATURE}
        given = _whole_arguments(self.said) if is_cut else _as_object(self.said)
        if given is None:
            return {"type": "text", "text": f'{{"name": {json.dumps(self.name)}, "arguments": {self.said}'}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": given}


class MessagesWriter(EventStreamFormat):
    """The writer of one Messages response, which has a single choice."""

    def __init__(self, message_id: str, model: str) -> None:
        self._id = message_id
        self._model = model
        self._blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None  # the last block, while it receives deltas
        self._held = ""  # whitespace that may be the start of a text
        self._streams = False
        self._end: ChoiceEnd | None = None

    def start(self, start: StreamStart) -> list[JsonEvent]:
        self._streams = True
        usage = TokenUsage(start.prompt_tokens, start.cached_tokens or 0, 0)
        return [_event("message_start", message=self._message([], None, usage)), PING]

    def add(self, index: int, events: Sequence[ReplyEvent], logprobs: Sequence[TokenLogprob]) -> list[JsonEvent]:
        del index, logprobs
        return [sent for event in events for sent in self._add(event)]

    def finish_choice(self, index: int, end: ChoiceEnd) -> list[JsonEvent]:
        del index
        self._end = end
        return self._close_block()

    def finish(self, usage: TokenUsage) -> list[JsonEvent]:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        return [_event("message_delta", delta=delta, usage=message_usage(usage)), _event("message_stop")]

    def ping(self, doing: str) -> bytes:
        del doing  # the API has no field for it
        return encode_sse([PING])

    def fail(self, error: RequestError) -> list[JsonEvent]:
        return [JsonEvent(messages_error(error), "error")]

    def whole(self, usage: TokenUsage) -> MessagesResponse:
        assert self._end is not None
        is_cut = self._end.reason == "length"
        last = len(self._blocks) - 1
        content = [block.whole(is_cut=is_cut and place == last) for place, block in enumerate(self._blocks)]
        return self._message(content, self._stop_reason(), usage)

    def _message(
        self, content: list[BlockResponse], stop_reason: StopReason | None, usage: TokenUsage
    ) -> MessagesResponse:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._stop_sequence(),
            "usage": message_usage(usage),
        }

    def _add(self, event: ReplyEvent) -> list[JsonEvent]:
        if isinstance(event, ReplyText):
            return self._add_text(event.text)
        if isinstance(event, ReplyThinking):
            return self._grow("thinking", event.text)
        if isinstance(event, ToolCallStart):
            return self._open_block(ContentBlock("tool_use", event.id, event.name))
        if isinstance(event, ToolCallArguments):
            return self._grow("tool_use", event.text)
        assert isinstance(event, ToolCallEnd)
        return self._close_block()

    def _add_text(self, text: str) -> list[JsonEvent]:
        """Write text, but hold back leading whitespace: models write it before a call, and clients do not send a
        whitespace-only block back."""
        if self._open is None or self._open.kind != "text":
            self._held += text
            if not self._held.strip():
                return []
            text, self._held = self._held, ""
        return self._grow("text", text)

    def _grow(self, kind: Literal["text", "thinking", "tool_use"], piece: str) -> list[JsonEvent]:
        if not piece:
            return []
        opened = [] if self._open and self._open.kind == kind else self._open_block(ContentBlock(kind))
        assert self._open is not None
        self._open.pieces.append(piece)
        return [*opened, self._block_event("content_block_delta", delta=self._open.delta(piece))]

    def _open_block(self, block: ContentBlock) -> list[JsonEvent]:
        closed = self._close_block()
        self._blocks.append(block)
        self._open = block
        return [*closed, self._block_event("content_block_start", content_block=block.opening())]

    def _close_block(self) -> list[JsonEvent]:
        self._held = ""
        block, self._open = self._open, None
        if block is None:
            return []
        signed = []
        if block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            signed = [self._block_event("content_block_delta", delta=signature)]
        return [*signed, self._block_event("content_block_stop")]

    def _block_event(self, name: str, **fields: Any) -> JsonEvent:
        return _event(name, index=len(self._blocks) - 1, **fields)

    def _stop_reason(self) -> StopReason:
        assert self._end is not None
        if self._end.stop:
            return "stop_sequence"
        if self._end.reason == "length":
            return "max_tokens"
        return "tool_use" if any(self._is_call(block) for block in self._blocks) else "end_turn"

    def _stop_sequence(self) -> str | None:
        return (self._end.stop or None) if self._end else None

    def _is_call(self, block: ContentBlock) -> bool:
        """Return whether a block counts as a call. A call that was already streamed counts even if its arguments are
        invalid."""
        return block.kind == "tool_use" and (self._streams or _as_object(block.said) is not None)


def _event(name: str, **fields: Any) -> JsonEvent:
    return JsonEvent({"type": name, **fields}, name)


def _as_object(arguments: str) -> dict[str, Any] | None:
    try:
        given = json.loads(arguments or "{}")
        json.dumps(given, allow_nan=False)  # json.loads accepts NaN, which no response can contain
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def _whole_arguments(arguments: str) -> dict[str, Any] | None:
    """Parse the arguments of a call that was cut off, without the incomplete last member."""
    try:
        given = from_json(arguments or "{}", allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return None
    return given if isinstance(given, dict) else None
