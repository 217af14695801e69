"""One answer while it is read: text that arrives in pieces, what of it is held back, and the events that it gave.

Readers of forms are generators: they yield where they need more text, raise `NoCall` where what they read is no call
after all (what is held becomes text), and `CallOver` where a call that had begun came to a bad end. None of them sees
where pieces end, so the cut does not matter.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator
from typing import TypeVar

from kvstrata.text.calls.json_scan import SPACE
from kvstrata.text.calls.offered import Offered
from kvstrata.text.events import CallArguments, CallBegun, CallEnded, ReplyEvent, Text
from kvstrata.text.stop import StopMatcher

Value = TypeVar("Value")
Steps = Generator[None, None, Value]

_STRIDE = 4096  # characters that are searched for a mark at once


class NoCall(Exception):
    """What is held is text."""


class CallOver(Exception):
    """The call ended before it was whole; all that belongs to it has been given."""


class Reading:
    def __init__(self, offered: Offered) -> None:
        self.offered = offered
        self.events: list[ReplyEvent] = []
        self.text = ""
        self.pos = 0
        self.ended = False
        self.cut_off = False
        self.line_start = True  # nothing but space since the last line break
        self.in_marks = False  # marks of calls are open, in which a name alone is a call
        self.ends: tuple[str, ...] = ()  # what a broken call ends at
        self.closers: list[str] = []  # what closes the objects and lists around the call, the innermost last
        self._base = 0  # how many characters came before `text`
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
        """The next character; empty: the answer is over."""
        while self.pos == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    @property
    def place(self) -> int:
        return self._base + self.pos

    def back(self, place: int) -> None:
        """To a place in what is held."""
        if place < self._base:
            before = "".join(self._held or ())
            self.text, self._base = before + self.text, self._base - len(before)
            self._held, self._held_from = [], 0
        self.pos = place - self._base

    def hold(self) -> None:
        if self._held is None:
            self._held, self._held_from = [], self.pos

    def drop(self) -> str:
        """What was held."""
        held = "".join(self._held or ()) + self.text[self._held_from : self.pos] if self._held is not None else ""
        self._held = None
        return held

    def release(self) -> None:
        self.say(self.drop())

    def say(self, text: str) -> None:
        if text:
            line = text.rpartition("\n")[2]
            self.line_start = not line.strip() and (self.line_start or "\n" in text)
            self.events.append(Text(text))

    def begin_call(self, name: str, id: str = "") -> None:
        """What is held belongs to the call's form. An id that came before in this reply names no call."""
        self.drop()
        if not id or id in self._ids:
            id = uuid.uuid4().hex[:9]  # nine letters or digits, which every template takes back
        self._ids.add(id)
        self.events.append(CallBegun(id, name))

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(CallArguments(text))

    def end_call(self) -> None:
        """And holds back what follows, which may belong to the call's form."""
        self.events.append(CallEnded())
        self.hold()

    def whole_call(self, name: str, arguments: str, id: str = "") -> None:
        self.begin_call(name, id)
        self.arguments(arguments)
        self.end_call()

    def break_off(self) -> Steps[None]:
        """Gives the rest of a broken call as it was written. Always raises CallOver."""
        self.arguments(self.drop())
        found = yield from until(self, self.ends, self.arguments)
        if found or not self.cut_off:
            self.end_call()
        raise CallOver


def space(reading: Reading, characters: str = SPACE) -> Steps[str]:
    """Takes it, and looks at what follows."""
    while (character := (yield from reading.look())) and character in characters:
        reading.pos += 1
    return character


def expect(reading: Reading, character: str) -> Steps[str]:
    """Space, the character, space."""
    if (yield from space(reading)) != character:
        raise NoCall
    reading.pos += 1
    return (yield from space(reading))


def mark(reading: Reading, marks: tuple[str, ...]) -> Steps[str]:
    """Takes the one of these that comes next. Empty: none of them does, and how much was taken is left open."""
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


def until(reading: Reading, marks: tuple[str, ...], take: Callable[[str], None]) -> Steps[str]:
    """Hands on the text before the first of the marks, and takes that. Empty: the answer ended without one."""
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
