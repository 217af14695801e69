"""Responses of OpenAI's chat and completions APIs: stream chunks or complete responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.engine.request import TokenLogprob, TokenUsage
from kvstrata.errors import RequestError
from kvstrata.server.chat.writer import ChoiceEnd, EventStreamFormat, JsonEvent, StreamStart, comment
from kvstrata.server.http.errors import openai_error
from kvstrata.server.openai.schema import (
    ChatChoiceResponse,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    CompletionChoiceResponse,
    CompletionLogprobs,
    Finish,
    ToolCallResponse,
    TopLogprob,
    completion_usage,
)
from kvstrata.server.state import ServerState
from kvstrata.text.reply_events import (
    ReplyEvent,
    ReplyText,
    ReplyThinking,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from kvstrata.text.tokenizer import token_bytes, token_text

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON lacks
DONE = JsonEvent("[DONE]")


class ChatChoice:
    """A choice of a chat response. `add` and `finish` return choices of chunks."""

    def __init__(self, index: int, tokenizer: TokenizerWrapper) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[ToolCallResponse] = []  # without their arguments
        self._arguments: list[list[str]] = []  # pieces, by call
        self._in_call = False
        self._logprobs: list[ChatTokenLogprob] | None = None  # grows in place: a reply may have 100,000 tokens
        self._finish: Finish = "stop"
        self._role_sent = False

    def add(self, events: Sequence[ReplyEvent], tokens: Sequence[TokenLogprob]) -> list[Any]:
        logprobs = self._add_logprobs(tokens)
        deltas = [delta for event in events if (delta := self._add(event))]
        if logprobs is None:
            return [self._delta(delta, None, None) for delta in deltas]
        # Logprobs go with the first delta of their tokens, or with an empty one if the text is held back.
        first, rest = (deltas[0], deltas[1:]) if deltas else ({"content": ""}, [])
        return [self._delta(first, logprobs, None), *(self._delta(delta, None, None) for delta in rest)]

    def finish(self, end: ChoiceEnd) -> list[Any]:
        # Clients run calls on this finish reason, so a call that a stop string cut off must not get it.
        is_call = bool(self._calls) and not self._in_call and end.reason == "stop"
        self._finish = "tool_calls" if is_call else end.reason
        return [self._delta({} if self._role_sent else {"content": ""}, None, self._finish)]

    def whole(self) -> ChatChoiceResponse:
        text = "".join(self._text)
        message: ChatMessage = {"role": "assistant", "content": text, "refusal": None}
        if thinking := "".join(self._thinking):
            message["reasoning_content"] = thinking
        if self._calls:
            message["content"] = text or None
            pairs = zip(self._calls, self._arguments, strict=True)
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(pieces)}} for call, pieces in pairs
            ]
        logprobs: ChatLogprobs | None = None
        if self._logprobs is not None:
            logprobs = {"content": self._logprobs, "refusal": None}
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish}

    def _add(self, event: ReplyEvent) -> dict[str, Any]:
        if isinstance(event, ReplyText):
            self._text.append(event.text)
            return {"content": event.text}
        if isinstance(event, ReplyThinking):
            self._thinking.append(event.text)
            return {"reasoning_content": event.text}
        self._in_call = not isinstance(event, ToolCallEnd)
        if isinstance(event, ToolCallStart):
            self._calls.append({"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
            self._arguments.append([])
            called: dict[str, Any] = {"name": event.name, "arguments": ""}
            return self._call_delta({"id": event.id, "type": "function", "function": called})
        if isinstance(event, ToolCallArguments):
            self._arguments[-1].append(event.text)
            return self._call_delta({"function": {"arguments": event.text}})
        return {}

    def _call_delta(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}

    def _delta(self, delta: dict[str, Any], logprobs: ChatLogprobs | None, finish: Finish | None) -> dict[str, Any]:
        if not self._role_sent:
            self._role_sent = True
            delta = {"role": "assistant", **delta}
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not logprobs:
            return None
        new: list[ChatTokenLogprob] = [
            {
                **self._top(token.id, token.logprob),
                "top_logprobs": [self._top(token_id, logprob) for token_id, logprob in token.top],
            }
            for token in logprobs
        ]
        if self._logprobs is None:
            self._logprobs = []
        self._logprobs += new
        return {"content": new, "refusal": None}

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return {
            "token": token_text(self._tokenizer, token_id),
            "logprob": max(LEAST_LOGPROB, logprob),
            "bytes": list(token_bytes(self._tokenizer, token_id)),
        }


class CompletionChoice:
    def __init__(self, index: int, tokenizer: TokenizerWrapper) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._logprobs: CompletionLogprobs | None = None  # grows in place
        self._offset = 0
        self._finish: Finish = "stop"

    def add(self, events: Sequence[ReplyEvent], tokens: Sequence[TokenLogprob]) -> list[Any]:
        text = "".join(event.text for event in events if isinstance(event, ReplyText))
        self._text.append(text)
        logprobs = self._add_logprobs(tokens)
        return [{"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}]

    def finish(self, end: ChoiceEnd) -> list[Any]:
        self._finish = end.reason
        return [{"index": self._index, "text": "", "logprobs": None, "finish_reason": self._finish}]

    def whole(self) -> CompletionChoiceResponse:
        text = "".join(self._text)
        return {"index": self._index, "text": text, "logprobs": self._logprobs, "finish_reason": self._finish}

    def _add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not logprobs:
            return None
        new = _no_logprobs()
        for token in logprobs:
            text = token_text(self._tokenizer, token.id)
            new["tokens"].append(text)
            new["token_logprobs"].append(max(LEAST_LOGPROB, token.logprob))
            new["top_logprobs"].append(self._top(token))
            new["text_offset"].append(self._offset)
            self._offset += len(text)
        if self._logprobs is None:
            self._logprobs = _no_logprobs()
        for key, values in new.items():
            self._logprobs[key] += values
        return new

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        return {token_text(self._tokenizer, token_id): max(LEAST_LOGPROB, logprob) for token_id, logprob in token.top}


class OpenAIWriter(EventStreamFormat):
    """A writer whose chunks repeat an envelope; pings are comments."""

    def __init__(
        self, envelope: dict[str, Any], choices: Sequence[ChatChoice | CompletionChoice], *, include_usage: bool = False
    ) -> None:
        self._envelope = envelope
        self._choices = choices
        self._include_usage = include_usage

    def start(self, start: StreamStart) -> list[JsonEvent]:
        del start
        return []

    def add(self, index: int, events: Sequence[ReplyEvent], logprobs: Sequence[TokenLogprob]) -> list[JsonEvent]:
        return self._chunks(self._choices[index].add(events, logprobs))

    def finish_choice(self, index: int, end: ChoiceEnd) -> list[JsonEvent]:
        return self._chunks(self._choices[index].finish(end))

    def finish(self, usage: TokenUsage) -> list[JsonEvent]:
        if not self._include_usage:
            return [DONE]
        return [JsonEvent({**self._envelope, "choices": [], "usage": completion_usage(usage)}), DONE]

    def ping(self, doing: str) -> bytes:
        return comment(doing)

    def fail(self, error: RequestError) -> list[JsonEvent]:
        return [JsonEvent(openai_error(error))]

    def whole(self, usage: TokenUsage) -> Any:
        choices = [choice.whole() for choice in self._choices]
        return {**self._envelope, "choices": choices, "usage": completion_usage(usage)}

    def _chunks(self, choices: list[Any]) -> list[JsonEvent]:
        extra = {"usage": None} if self._include_usage else {}
        return [JsonEvent({**self._envelope, "choices": [choice], **extra}) for choice in choices]


def envelope(state: ServerState, generation_id: str, kind: str) -> dict[str, Any]:
    """Return the fields that every chunk repeats."""
    return {
        "id": generation_id,
        "object": kind,
        "created": int(time.time()),
        "model": state.name,
        "system_fingerprint": f"kvstrata-{state.loaded.fingerprint[:12]}",
    }


def _no_logprobs() -> CompletionLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
