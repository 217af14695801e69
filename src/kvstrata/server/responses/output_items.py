"""Output items of a response and the events that build them. Independent of sequence numbers and of the response
object.

An item is open while the model writes it; the start of another kind of output closes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstrata.engine.request import TokenLogprob
from kvstrata.server.responses.request import pack_thinking
from kvstrata.server.responses.schema import (
    CustomCallResponse,
    FunctionCallResponse,
    ItemStatus,
    MessageItemResponse,
    OutputItemResponse,
    OutputLogprob,
    OutputText,
    ReasoningItemResponse,
    ReasoningText,
)
from kvstrata.server.responses.tools import FreeTextInput, ToolName
from kvstrata.text.reply_events import ReplyEvent, ReplyText, ReplyThinking, ToolCallArguments, ToolCallStart

StreamEvent = dict[str, Any]  # `type` and its fields

LogprobFormat = Callable[[Sequence[TokenLogprob]], list[OutputLogprob]]


class _OpenItem:
    """An output item that is being written. `kind`: the prefix of its id."""

    def __init__(self, index: int, kind: str) -> None:
        self.id = f"{kind}_{uuid.uuid4().hex}"
        self.index = index
        self._pieces: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def item(self, status: ItemStatus) -> OutputItemResponse:
        raise NotImplementedError

    def opened(self) -> list[StreamEvent]:
        return [self._item_event("added", "in_progress")]

    def closed(self, status: ItemStatus) -> list[StreamEvent]:
        return [self._item_event("done", status)]

    def _item_event(self, what: str, status: ItemStatus) -> StreamEvent:
        return {"type": f"response.output_item.{what}", "output_index": self.index, "item": self.item(status)}

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}


class _Reasoning(_OpenItem):
    def __init__(self, index: int, *, packs: bool) -> None:
        super().__init__(index, "rs")
        self._packs = packs
        self._has_part = False

    def item(self, status: ItemStatus) -> ReasoningItemResponse:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [self._part()] if self._has_part else [],
            "encrypted_content": pack_thinking(self._text) if self._packs and self._has_part else None,
        }

    def opened(self) -> list[StreamEvent]:
        added = super().opened()
        self._has_part = True
        return [*added, self._event("content_part.added", content_index=0, part=self._part())]

    def add(self, text: str) -> list[StreamEvent]:
        self._pieces.append(text)
        return [self._event("reasoning_text.delta", content_index=0, delta=text)]

    def closed(self, status: ItemStatus) -> list[StreamEvent]:
        return [
            self._event("reasoning_text.done", content_index=0, text=self._text),
            self._event("content_part.done", content_index=0, part=self._part()),
            *super().closed(status),
        ]

    def _part(self) -> ReasoningText:
        return {"type": "reasoning_text", "text": self._text}


class _Message(_OpenItem):
    def __init__(self, index: int) -> None:
        super().__init__(index, "msg")
        self._logprobs: list[OutputLogprob] = []
        self._has_part = False

    def item(self, status: ItemStatus) -> MessageItemResponse:
        content = [self._part()] if self._has_part else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def opened(self) -> list[StreamEvent]:
        added = super().opened()
        self._has_part = True
        return [*added, self._event("content_part.added", content_index=0, part=self._part())]

    def add(self, text: str, logprobs: list[OutputLogprob]) -> list[StreamEvent]:
        self._pieces.append(text)
        self._logprobs += logprobs
        return [self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def closed(self, status: ItemStatus) -> list[StreamEvent]:
        return [
            self._event("output_text.done", content_index=0, text=self._text, logprobs=self._logprobs),
            self._event("content_part.done", content_index=0, part=self._part()),
            *super().closed(status),
        ]

    def _part(self) -> OutputText:
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": logprobs}


class _FunctionCall(_OpenItem):
    def __init__(self, index: int, call_id: str, tool: ToolName) -> None:
        super().__init__(index, "fc")
        self._call_id = call_id
        self._tool = tool

    def item(self, status: ItemStatus) -> FunctionCallResponse:
        item: FunctionCallResponse = {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._tool.name,
            "arguments": self._text,
        }
        return item if self._tool.namespace is None else {**item, "namespace": self._tool.namespace}

    def add(self, text: str) -> list[StreamEvent]:
        self._pieces.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def closed(self, status: ItemStatus) -> list[StreamEvent]:
        done = self._event("function_call_arguments.done", name=self._tool.name, arguments=self._text)
        return [done, *super().closed(status)]


class _CustomCall(_OpenItem):
    def __init__(self, index: int, call_id: str, tool: ToolName) -> None:
        super().__init__(index, "ctc")
        self._call_id = call_id
        self._tool = tool
        self._reader = FreeTextInput()

    def item(self, status: ItemStatus) -> CustomCallResponse:
        item: CustomCallResponse = {
            "id": self.id,
            "type": "custom_tool_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._tool.name,
            "input": self._text,
        }
        return item if self._tool.namespace is None else {**item, "namespace": self._tool.namespace}

    def add(self, text: str) -> list[StreamEvent]:
        return self._delta(self._reader.add(text))

    def closed(self, status: ItemStatus) -> list[StreamEvent]:
        rest = self._delta(self._reader.finish())
        return [*rest, self._event("custom_tool_call_input.done", input=self._text), *super().closed(status)]

    def _delta(self, text: str) -> list[StreamEvent]:
        if not text:
            return []
        self._pieces.append(text)
        return [self._event("custom_tool_call_input.delta", delta=text)]


class OutputItems:
    """The output of one response. `packs_thinking`: reasoning is also returned in `encrypted_content`."""

    def __init__(self, names: Mapping[str, ToolName], logprobs: LogprobFormat, *, packs_thinking: bool = False) -> None:
        self.items: list[OutputItemResponse] = []  # closed items
        self._names = names
        self._format_logprobs = logprobs
        self._packs_thinking = packs_thinking
        self._open: _Reasoning | _Message | _FunctionCall | _CustomCall | None = None
        self._blank = ""  # held-back whitespace that may begin a message
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is not complete yet

    def add(self, events: Sequence[ReplyEvent], logprobs: Sequence[TokenLogprob] = ()) -> list[StreamEvent]:
        self._logprobs += logprobs
        return [out for event in events for out in self._add(event)]

    def end(self, *, cut_off: bool) -> list[StreamEvent]:
        out: list[StreamEvent] = []
        if self._open is None and not self.items:
            out += self._open_as(_Message(0))
            out += self._add_to_message(self._blank) if self._blank else []
        if cut_off and isinstance(self._open, _FunctionCall | _CustomCall):
            # No done event: clients run a call when they receive it, and this call is incomplete.
            self.items.append(self._open.item("incomplete"))
            self._open = None
        return out + self._close("incomplete" if cut_off else "completed")

    def _add(self, event: ReplyEvent) -> list[StreamEvent]:
        if isinstance(event, ReplyText):
            return self._add_text(event.text)
        # This API has logprobs of text only.
        self._logprobs.clear()
        if isinstance(event, ReplyThinking):
            return self._add_thinking(event.text)
        self._blank = ""
        if isinstance(event, ToolCallStart):
            return self._begin_call(event)
        if isinstance(event, ToolCallArguments):
            if event.text and isinstance(self._open, _FunctionCall | _CustomCall):
                return self._open.add(event.text)
            return []
        return self._close("completed")

    def _add_text(self, text: str) -> list[StreamEvent]:
        if isinstance(self._open, _Message):
            return self._add_to_message(text) if text else []
        # Line breaks that models write between calls do not make a message.
        self._blank += text
        if not self._blank.strip():
            return []
        text, self._blank = self._blank, ""
        return [*self._open_as(_Message(self._next)), *self._add_to_message(text)]

    def _add_to_message(self, text: str) -> list[StreamEvent]:
        assert isinstance(self._open, _Message)
        logprobs = self._format_logprobs(self._logprobs)
        self._logprobs.clear()
        return self._open.add(text, logprobs)

    def _add_thinking(self, text: str) -> list[StreamEvent]:
        if not text:
            return []
        self._blank = ""
        opened: list[StreamEvent] = []
        if not isinstance(self._open, _Reasoning):
            reasoning = _Reasoning(self._next, packs=self._packs_thinking)
            opened = self._open_as(reasoning)
        assert isinstance(self._open, _Reasoning)
        return [*opened, *self._open.add(text)]

    def _begin_call(self, begun: ToolCallStart) -> list[StreamEvent]:
        tool = self._names.get(begun.name, ToolName(begun.name))
        make = _CustomCall if tool.is_custom else _FunctionCall
        return self._open_as(make(self._next, begun.id, tool))

    @property
    def _next(self) -> int:
        return len(self.items) + (self._open is not None)

    def _open_as(self, item: _Reasoning | _Message | _FunctionCall | _CustomCall) -> list[StreamEvent]:
        closed = self._close("completed")
        self._open = item
        return [*closed, *item.opened()]

    def _close(self, status: ItemStatus) -> list[StreamEvent]:
        item, self._open = self._open, None
        if item is None:
            return []
        events = item.closed(status)
        self.items.append(item.item(status))
        return events
