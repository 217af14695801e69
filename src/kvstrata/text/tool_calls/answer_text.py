"""An answer while it arrives: its text, the text held back, its events, and the tools that the request offers.

Scanners of call formats are generators. They yield where they need more text, raise `NoCall` if the text turns out not
to be a call (held text is then released), and `CallOver` if a call that has begun cannot be completed. The ends of the
pieces have no influence on them.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

from kvstrata.text.reply_events import ReplyEvent, ReplyText, ToolCallArguments, ToolCallEnd, ToolCallStart
from kvstrata.text.stop import StopMatcher

_STRIDE = 4096  # characters that are searched for a mark at once
SPACE = " \t\n\r"


class Words:
    """Sorted words: tells in logarithmic time whether a word begins with a given text."""

    def __init__(self, words: Iterable[str]) -> None:
        self._sorted = sorted(set(words))
        self._all = frozenset(self._sorted)

    def __contains__(self, word: str) -> bool:
        return word in self._all

    def may_begin(self, start: str) -> bool:
        place = bisect_left(self._sorted, start)
        return place < len(self._sorted) and self._sorted[place].startswith(start)


class OfferedTools:
    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self.tools = list(tools)
        self._functions = {
            function["name"]: function
            for tool in tools
            if isinstance(function := tool.get("function"), dict) and isinstance(function.get("name"), str)
        }
        self.names = Words(self._functions)

    def parameter(self, name: str, key: str) -> dict[str, Any] | None:
        """Return the schema of one parameter; None: the tool does not name it."""
        parameters = self._functions[name].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        schema = properties.get(key) if isinstance(properties, dict) else None
        return schema if isinstance(schema, dict) else None


Value = TypeVar("Value")

Steps = Generator[None, None, Value]


class NoCall(Exception):
    """The held text is no call."""


class CallOver(Exception):
    """The call ended before it was complete; events for all of its text exist."""


class AnswerText:
    def __init__(self, offered: OfferedTools) -> None:
        self.offered = offered
        self.events: list[ReplyEvent] = []
        self.text = ""
        self.pos = 0
        self.ended = False
        self.cut_off = False
        self.line_start = True  # nothing but space since the last line break
        self.in_marks = False  # between call marks, where a name without arguments is a call
        self.ends: tuple[str, ...] = ()  # marks that end a malformed call
        self.closers: list[str] = []  # closing brackets of the objects and lists around the call, the innermost last
        self._base = 0  # number of characters before `text`
        self._held: list[str] | None = None
        self._held_from = 0
        self._ids: set[str] = set()

    def more(self, text: str) -> None:
        if self._held is not None:
            self._held.append(self.text[self._held_from :])
            self._held_from = 0
        self._base += len(self.text)
        self.text, self.pos = text, 0

    def look(self) -> Steps[str]:
        """Return the next character without taking it; empty: the answer is over."""
        while self.pos == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    @property
    def place(self) -> int:
        return self._base + self.pos

    def back(self, place: int) -> None:
        """Go back to a place in the held text."""
        if place < self._base:
            before = "".join(self._held or ())
            self.text, self._base = before + self.text, self._base - len(before)
            self._held, self._held_from = [], 0
        self.pos = place - self._base

    def hold(self) -> None:
        if self._held is None:
            self._held, self._held_from = [], self.pos

    def drop(self) -> str:
        """Return the held text without an event for it."""
        held = "".join(self._held or ()) + self.text[self._held_from : self.pos] if self._held is not None else ""
        self._held = None
        return held

    def release(self) -> None:
        self.say(self.drop())

    def say(self, text: str) -> None:
        if text:
            line = text.rpartition("\n")[2]
            self.line_start = not line.strip() and (self.line_start or "\n" in text)
            self.events.append(ReplyText(text))

    def begin_call(self, name: str, id: str = "") -> None:
        """Begin a call: the held text was its opening. An id that this reply has used already is replaced."""
        self.drop()
        if not id or id in self._ids:
            id = uuid.uuid4().hex[:9]  # nine letters or digits, which every template takes back
        self._ids.add(id)
        self.events.append(ToolCallStart(id, name))

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(ToolCallArguments(text))

    def end_call(self) -> None:
        """End the call, and hold back the text after it, which may belong to the call's format."""
        self.events.append(ToolCallEnd())
        self.hold()

    def whole_call(self, name: str, arguments: str, id: str = "") -> None:
        self.begin_call(name, id)
        self.arguments(arguments)
        self.end_call()

    def break_off(self) -> Steps[None]:
        """Give the rest of a malformed call as it was written. Always raises CallOver."""
        self.arguments(self.drop())
        found = yield from until(self, self.ends, self.arguments)
        if found or not self.cut_off:
            self.end_call()
        raise CallOver


def space(reading: AnswerText, characters: str = SPACE) -> Steps[str]:
    """Skip white space, and return the next character without taking it."""
    while (character := (yield from reading.look())) and character in characters:
        reading.pos += 1
    return character


def expect(reading: AnswerText, character: str) -> Steps[str]:
    """Take a character and the white space around it, and return the next one. Raises NoCall for another character."""
    if (yield from space(reading)) != character:
        raise NoCall
    reading.pos += 1
    return (yield from space(reading))


def mark(reading: AnswerText, marks: tuple[str, ...]) -> Steps[str]:
    """Take the mark that comes next, and return it; empty: none does, and an unknown part of the text was taken."""
    num_taken = 0
    alive = marks
    while alive:
        character = yield from reading.look()
        alive = tuple(one for one in alive if character and one[num_taken] == character)
        if alive:
            reading.pos += 1
            num_taken += 1
            if found := next((one for one in alive if len(one) == num_taken), ""):
                return found
    return ""


def offered_name(reading: AnswerText, ends: str) -> Steps[str]:
    """Take the name of an offered tool, up to one of the characters `ends`. Raises NoCall at the first wrong letter."""
    name = ""
    while (character := (yield from reading.look())) and character not in ends:
        name += character
        if not reading.offered.names.may_begin(name):
            raise NoCall
        reading.pos += 1
    if name not in reading.offered.names:
        raise NoCall
    return name


def until(reading: AnswerText, marks: tuple[str, ...], take: Callable[[str], None]) -> Steps[str]:
    """Give the text before the first mark to `take`, and return that mark; empty: the answer ended without one."""
    matcher = StopMatcher(marks)
    while (yield from reading.look()):
        stride = reading.text[reading.pos : reading.pos + _STRIDE]
        found = matcher.add(stride)
        reading.pos += len(stride) - len(found.rest)
        take(found.text)
        if found.stopped:
            return found.stop
    take(matcher.finish())
    return ""
