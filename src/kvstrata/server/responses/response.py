"""Responses of OpenAI's Responses API: numbered events, or one response object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstrata.engine.request import TokenLogprob, TokenUsage
from kvstrata.errors import ContextTooLong, NeverFits, RequestError
from kvstrata.server.chat.writer import ChoiceEnd, EventStreamFormat, JsonEvent, StreamStart, encode_sse
from kvstrata.server.responses.output_items import OutputItems, StreamEvent
from kvstrata.server.responses.schema import OutputLogprob, OutputTopLogprob, ResponsesResponse, Status, responses_usage
from kvstrata.text.reply_events import ReplyEvent
from kvstrata.text.tokenizer import token_bytes, token_text

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


class ResponsesWriter(EventStreamFormat):
    """Writes one response. `opening`: the response object at its start."""

    def __init__(self, opening: ResponsesResponse, output: OutputItems) -> None:
        self._opening = opening
        self._output = output
        self._num_events = 0
        self._status: Status = "in_progress"
        self._completed_at: int | None = None

    def start(self, start: StreamStart) -> list[JsonEvent]:
        del start
        return self._numbered([self._about("created", self._opening), self._about("in_progress", self._opening)])

    def add(self, index: int, events: Sequence[ReplyEvent], logprobs: Sequence[TokenLogprob]) -> list[JsonEvent]:
        del index  # there is one reply
        return self._numbered(self._output.add(events, logprobs))

    def finish_choice(self, index: int, end: ChoiceEnd) -> list[JsonEvent]:
        del index
        is_cut_off = end.reason == "length"
        events = self._output.end(cut_off=is_cut_off)
        self._status = "incomplete" if is_cut_off else "completed"
        self._completed_at = None if is_cut_off else int(time.time())
        return self._numbered(events)

    def finish(self, usage: TokenUsage) -> list[JsonEvent]:
        return self._numbered([self._about(self._status, self.whole(usage))])

    def ping(self, doing: str) -> bytes:
        """Return an in_progress event: Codex resets its timeout on events, not on comments."""
        del doing
        return encode_sse(self._numbered([self._about("in_progress", self._opening)]))

    def fail(self, error: RequestError) -> list[JsonEvent]:
        failed: ResponsesResponse = {
            **self._opening,
            "status": "failed",
            "error": {"code": _code(error), "message": error.message},
            "output": self._output.items,
        }
        return self._numbered([self._about("failed", failed)])

    def whole(self, usage: TokenUsage) -> ResponsesResponse:
        return {
            **self._opening,
            "completed_at": self._completed_at,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": self._output.items,
            "usage": responses_usage(usage),
        }

    def _about(self, what: str, response: ResponsesResponse) -> StreamEvent:
        return {"type": f"response.{what}", "response": response}

    def _numbered(self, events: Sequence[StreamEvent]) -> list[JsonEvent]:
        first, self._num_events = self._num_events, self._num_events + len(events)
        return [
            JsonEvent({"type": event["type"], "sequence_number": number, **event}, event["type"])
            for number, event in enumerate(events, first)
        ]


class Logprobs:
    """Converts logprobs of tokens to the format of the API."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer

    def __call__(self, tokens: Sequence[TokenLogprob]) -> list[OutputLogprob]:
        return [
            {**self._top(token.id, token.logprob), "top_logprobs": [self._top(*top) for top in token.top]}
            for token in tokens
        ]

    def _top(self, token_id: int, logprob: float) -> OutputTopLogprob:
        return {
            "token": token_text(self._tokenizer, token_id),
            "logprob": max(LEAST_LOGPROB, logprob),
            "bytes": list(token_bytes(self._tokenizer, token_id)),
        }


def _code(error: RequestError) -> str:
    """Return an error code that OpenAI's clients know: it decides whether they shorten the prompt, wait, retry or give
    up."""
    if isinstance(error, ContextTooLong | NeverFits):
        return "context_length_exceeded"
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
