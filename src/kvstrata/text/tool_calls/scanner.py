"""Scan an answer for tool calls: places where one may begin, and the text held back meanwhile.

A call may begin at the marks of the model's own format anywhere; in other formats at the start of a line or in a code
fence of its own. Modules for single formats read the calls. Text is held back only while it can still be a call, and
white space only where it would be all there is between calls.
"""

from __future__ import annotations

import re
from typing import Literal

from kvstrata.text.reply_events import ReplyEvent, join_events
from kvstrata.text.tool_calls.answer_text import SPACE, AnswerText, CallOver, NoCall, OfferedTools, Steps, mark, space
from kvstrata.text.tool_calls.json_calls import scan_header_call, scan_json_calls
from kvstrata.text.tool_calls.native_calls import NativeCallFormat, scan_native_calls
from kvstrata.text.tool_calls.tagged_calls import FUNCTION, QWEN, TagFormat, scan_tagged_call

PYTHON_TAG = "<|python_tag|>"  # Llama may write it before its first call

_WRAPPERS = ("tool_call", "tool_calls", "function_call", "function_calls", "tools", "tool")

_OPENING = (*(f"<{name}>" for name in _WRAPPERS), PYTHON_TAG, FUNCTION)

_CLOSING = (*(f"</{name}>" for name in _WRAPPERS), "</function>")

_AFTER_CALL = SPACE + ",;}]"

_FENCE = 3

_MAX_FENCE_WORD = 20


class ToolCallScanner:
    """Find the calls of one answer. Thinking contains no calls."""

    def __init__(self, offered: OfferedTools, native: NativeCallFormat | None = None) -> None:
        self._native = native or NativeCallFormat()
        self._reading = AnswerText(offered)
        self._own = (self._native.start,) if self._native.start else ()
        self._opening = tuple(dict.fromkeys(self._own + _OPENING))
        self._closing = tuple(dict.fromkeys(((self._native.end,) if self._native.end else ()) + _CLOSING))
        firsts = "".join(re.escape(one[0]) for one in self._own)
        self._in_line = re.compile(f"[^\n`{firsts}]+")
        self._open_fence = 0  # number of ticks of an open fence that is text
        self._fence_line = False  # only the first line of that fence has arrived
        self._call_fence = 0  # number of ticks of an open fence that contains calls
        self._steps = self._answer()
        next(self._steps)

    def add(self, text: str) -> list[ReplyEvent]:
        if text:
            self._reading.more(text)
            next(self._steps)
        return self._events()

    def finish(self, *, cut_off: bool = False) -> list[ReplyEvent]:
        self._reading.ended, self._reading.cut_off = True, cut_off
        next(self._steps, None)
        return self._events()

    def _events(self) -> list[ReplyEvent]:
        events, self._reading.events = self._reading.events, []
        return join_events(events)

    def _answer(self) -> Steps[None]:
        reading = self._reading
        place: Literal["start", "after call", "text"] = "start"
        while True:
            if place != "text":
                reading.hold()
                yield from self._around_calls() if place == "after call" else space(reading)
            character = yield from reading.look()
            if not character:
                break
            if self._may_begin(character, follows_call=place == "after call"):
                place = "after call" if (yield from self._candidate(follows_call=place == "after call")) else "text"
            else:
                self._leave_calls()
                place = "text"
                self._pass(character)
        held = reading.drop()
        if place != "after call":
            reading.say(held)

    def _may_begin(self, character: str, *, follows_call: bool) -> bool:
        reading = self._reading
        if any(one.startswith(reading.text[reading.pos : reading.pos + len(one)]) for one in self._own):
            return True
        if self._open_fence:
            return character == "`" and (self._reading.line_start or self._fence_line)
        if not (follows_call or self._reading.line_start):
            return False
        return character in "{[<`" or (follows_call and self._native.kind == "headers")

    def _candidate(self, *, follows_call: bool) -> Steps[bool]:
        """Whether there was a call."""
        self._reading.hold()
        try:
            yield from self._call(anywhere=follows_call or self._reading.line_start)
        except NoCall:
            self._leave_calls()
            return False
        except CallOver:
            self._reading.in_marks, self._reading.closers, self._call_fence = False, [], 0
        return True

    def _leave_calls(self) -> None:
        """Release the held text as text."""
        self._reading.release()
        self._reading.in_marks, self._reading.ends, self._reading.closers = False, (), []
        if self._call_fence:
            self._open_fence, self._call_fence, self._fence_line = self._call_fence, 0, False

    def _pass(self, character: str) -> None:
        reading = self._reading
        run = None if reading.line_start else self._in_line.match(reading.text, reading.pos)
        end = run.end() if run else reading.pos + 1
        if character == "\n":
            self._fence_line = False
        reading.say(reading.text[reading.pos : end])
        reading.pos = end

    def _call(self, *, anywhere: bool) -> Steps[None]:
        """Scan one call. `anywhere`: a call in any format may begin here."""
        reading = self._reading
        begin = reading.place
        character = yield from reading.look()
        anywhere = anywhere and not self._open_fence
        if character == "`":
            return (yield from self._fence())
        marks = self._opening if anywhere else self._own
        if any(one[0] == character for one in marks):
            found = yield from mark(reading, marks)
            if found:
                return (yield from self._marked(found))
            if character != "[" or not anywhere:
                reading.back(begin + 1)
                raise NoCall
            reading.back(begin)
        if character in "{[":
            return (yield from scan_json_calls(reading))
        return (yield from scan_header_call(reading))

    def _marked(self, found: str) -> Steps[None]:
        reading, native = self._reading, self._native
        is_own = found == native.start
        reading.in_marks = is_own or found == _OPENING[0]
        reading.ends = (native.end,) if is_own and native.end else _CLOSING if found.startswith("<") else ()
        if found == FUNCTION:
            return (yield from scan_tagged_call(reading, QWEN))
        if is_own and native.kind == "whole" and native.parse:
            return (yield from scan_native_calls(reading, found, native.end, native.parse))
        if is_own and native.kind == "tagged" and native.dialect:
            return (yield from self._tagged(found, native.dialect))
        character = yield from space(reading)
        if character == "`":
            return (yield from self._fence())
        if character == "<":
            if not (yield from mark(reading, (FUNCTION,))):
                raise NoCall
            return (yield from scan_tagged_call(reading, QWEN))
        if is_own and native.kind == "headers" and character not in "[{":
            return (yield from scan_header_call(reading))
        return (yield from scan_json_calls(reading))

    def _tagged(self, found: str, dialect: TagFormat) -> Steps[None]:
        """Scan a tagged call. mlx-lm's parser reads variants of the format that `scan_tagged_call` does not."""
        reading, native = self._reading, self._native
        try:
            if (yield from space(reading)) in ("{", "["):
                yield from scan_json_calls(reading)
            else:
                yield from scan_tagged_call(reading, dialect)
        except NoCall:
            if native.parse is None:
                raise
            yield from scan_native_calls(reading, found, native.end, native.parse)

    def _fence(self) -> Steps[None]:
        reading = self._reading
        num_ticks = yield from self._ticks()
        if self._open_fence:
            if num_ticks >= self._open_fence and (yield from reading.look()) in ("", *SPACE):
                self._open_fence, self._fence_line = 0, False
            raise NoCall
        if num_ticks < _FENCE:
            raise NoCall
        has_line_break = False
        try:
            yield from self._fence_word()
            has_line_break = yield from self._space_with_line_break()
            self._call_fence = num_ticks
            reading.ends = ("`" * num_ticks,)
            character = yield from reading.look()
            if character in ("{", "["):
                return (yield from scan_json_calls(reading))
            found = (yield from mark(reading, self._opening)) if character == "<" else ""
            if not found:
                raise NoCall
            return (yield from self._marked(found))
        except NoCall:
            self._call_fence, self._open_fence = 0, num_ticks
            self._fence_line = not has_line_break
            raise

    def _ticks(self) -> Steps[int]:
        num_ticks = 0
        while (yield from self._reading.look()) == "`":
            self._reading.pos += 1
            num_ticks += 1
        return num_ticks

    def _fence_word(self) -> Steps[None]:
        num_letters = 0
        while (character := (yield from self._reading.look())) and (character.isalnum() or character in "_+.-"):
            self._reading.pos += 1
            num_letters += 1
            if num_letters > _MAX_FENCE_WORD:
                raise NoCall

    def _space_with_line_break(self) -> Steps[bool]:
        found = False
        while (character := (yield from self._reading.look())) and character in SPACE:
            found = found or character == "\n"
            self._reading.pos += 1
        return found

    def _around_calls(self) -> Steps[None]:
        """Skip white space, separators and closing marks after a call: hold or drop them as part of the format."""
        reading = self._reading
        while character := (yield from reading.look()):
            begin = reading.place
            if character in reading.closers[-1:]:
                reading.closers.pop()
                reading.pos += 1
            elif character in _AFTER_CALL:
                reading.pos += 1
                continue
            elif character == "`" and self._call_fence:
                if (yield from self._ticks()) < self._call_fence:
                    return
                self._call_fence = 0
            elif any(one[0] == character for one in self._closing):
                if not (yield from mark(reading, self._closing)):
                    if (yield from reading.look()):  # half a mark at the end of a reply is dropped
                        reading.back(begin)
                    return
                reading.in_marks, reading.ends, reading.closers = False, (), []
            else:
                return
            reading.drop()
            reading.hold()
