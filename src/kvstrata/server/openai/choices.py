"""From the engine's events to one choice of an answer, piece by piece or whole.

Knows OpenAI's two forms, chat and text. Knows nothing of HTTP: what comes out are values.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvstrata.engine.request import Finished, Piece, TokenLogprob
from kvstrata.server.openai.answers import (
    ChatChoiceAnswer,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    CompletionChoiceAnswer,
    CompletionLogprobs,
    Finish,
    ToolCallAnswer,
    TopLogprob,
)
from kvstrata.text.tokens import token_bytes, token_text
from kvstrata.text.tools import Split, Splitter, ToolCall

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

LEAST_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON has not


class Choice(Protocol):
    """Collects one reply. What `add` and `end` return goes into a stream; `whole` is the answer without one."""

    def add(self, piece: Piece) -> list[Any]: ...

    def end(self, finished: Finished) -> list[Any]: ...

    def whole(self) -> Any: ...


class ChatChoice:
    """`splitter` looks for tool calls and reasoning; without one all text is content."""

    def __init__(self, index: int, tokenizer: TokenizerWrapper, splitter: Splitter | None = None) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._splitter = splitter
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallAnswer] = []
        self._logprobs: list[ChatTokenLogprob] | None = None
        self._finish: Finish = "stop"
        self._role_sent = False

    def add(self, piece: Piece) -> list[Any]:
        split = self._splitter.add(piece.text, piece.ids) if self._splitter else Split(piece.text, ())
        logprobs = self._add_logprobs(piece.logprobs)
        return self._deltas(split, logprobs)

    def end(self, finished: Finished) -> list[Any]:
        cut_off = finished.reason == "length"
        deltas = self._deltas(self._splitter.finish(cut_off=cut_off), None) if self._splitter else []
        self._finish = "tool_calls" if self._calls and finished.reason == "stop" else _finish(finished)
        return [*deltas, self._delta({} if self._role_sent else {"content": ""}, None, self._finish)]

    def whole(self) -> ChatChoiceAnswer:
        text = "".join(self._text)
        message: ChatMessage = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["content"] = text or None
            message["tool_calls"] = self._calls
        logprobs: ChatLogprobs | None = None
        if self._logprobs is not None:
            logprobs = {"content": self._logprobs, "refusal": None}
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish}

    def _deltas(self, split: Split, logprobs: ChatLogprobs | None) -> list[Any]:
        self._text.append(split.content)
        self._reasoning.append(split.reasoning)
        calls = [self._add_call(call) for call in split.calls]
        delta: dict[str, Any] = {}
        if split.reasoning:
            delta["reasoning_content"] = split.reasoning
        if split.content or logprobs is not None:
            delta["content"] = split.content
        if calls:
            delta["tool_calls"] = [{"index": len(self._calls) - len(calls) + n, **call} for n, call in enumerate(calls)]
        return [self._delta(delta, logprobs, None)] if delta else []

    def _delta(self, delta: dict[str, Any], logprobs: ChatLogprobs | None, finish: Finish | None) -> dict[str, Any]:
        if not self._role_sent:
            self._role_sent = True
            delta = {"role": "assistant", **delta}
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _add_call(self, call: ToolCall) -> ToolCallAnswer:
        answer: ToolCallAnswer = {
            # Nine letters or digits, which every template takes back: Mistral's refuse others.
            "id": call.id or uuid.uuid4().hex[:9],
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        self._calls.append(answer)
        return answer

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
        self._logprobs = (self._logprobs or []) + new
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
        self._logprobs: CompletionLogprobs | None = None
        self._offset = 0
        self._finish: Finish = "stop"

    def add(self, piece: Piece) -> list[Any]:
        self._text.append(piece.text)
        logprobs = self._add_logprobs(piece.logprobs)
        if not piece.text and logprobs is None:
            return []
        return [{"index": self._index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}]

    def end(self, finished: Finished) -> list[Any]:
        self._finish = _finish(finished)
        return [{"index": self._index, "text": "", "logprobs": None, "finish_reason": self._finish}]

    def whole(self) -> CompletionChoiceAnswer:
        text = "".join(self._text)
        return {"index": self._index, "text": text, "logprobs": self._logprobs, "finish_reason": self._finish}

    def _add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not logprobs:
            return None
        new: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in logprobs:
            text = token_text(self._tokenizer, token.id)
            new["tokens"].append(text)
            new["token_logprobs"].append(max(LEAST_LOGPROB, token.logprob))
            new["top_logprobs"].append(self._top(token))
            new["text_offset"].append(self._offset)
            self._offset += len(text)
        self._logprobs = _joined(self._logprobs, new)
        return new

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        return {token_text(self._tokenizer, token_id): max(LEAST_LOGPROB, logprob) for token_id, logprob in token.top}


def _joined(old: CompletionLogprobs | None, new: CompletionLogprobs) -> CompletionLogprobs:
    if old is None:
        return new
    return {
        "tokens": old["tokens"] + new["tokens"],
        "token_logprobs": old["token_logprobs"] + new["token_logprobs"],
        "top_logprobs": old["top_logprobs"] + new["top_logprobs"],
        "text_offset": old["text_offset"] + new["text_offset"],
    }


def _finish(finished: Finished) -> Finish:
    return "length" if finished.reason == "length" else "stop"
