"""JSON that arrives in pieces: a scanner that validates one object, and a decoder of one string.

Both look at each character once. Knows nothing of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MAX_DEPTH = 100  # what clients' parsers take, and far more than arguments have
SPACE = " \t\n\r"

_DIGITS = "0123456789"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class JsonScanner:
    """One object. `done`: it is whole. `failed`: it is none.

    Control characters inside strings become their escapes: models write line breaks there, which JSON does not allow.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._stack: list[str] = []
        self._then: Callable[[str], bool] = self._after_value  # where a string goes on
        self._literal = ""
        self._num_hex = 0
        self._state: Callable[[str], bool] = self._root

    def add(self, text: str, start: int = 0) -> tuple[int, str]:
        """Where it stopped (after the object, or at the character that is wrong), and what it took, as JSON."""
        pieces: list[str] = []
        place = begin = start
        while place < len(text) and not self.done:
            if self._state == self._string and (match := _PLAIN.match(text, place)) and match.end() > place:
                place = match.end()
                continue
            character = text[place]
            if self._state == self._string and character < " ":
                pieces += (text[begin:place], json.dumps(character)[1:-1])
                begin = place + 1
            elif not self._state(character):
                self.failed = True
                break
            place += 1
        pieces.append(text[begin:place])
        return place, "".join(pieces)

    def _root(self, character: str) -> bool:
        return character == "{" and self._open(character)

    def _open(self, character: str) -> bool:
        self._stack.append(character)
        self._state = self._first_key if character == "{" else self._first_item
        return len(self._stack) <= MAX_DEPTH

    def _close(self, character: str) -> bool:
        if self._stack.pop() != {"}": "{", "]": "["}[character]:
            return False
        self._state = self._after_value
        self.done = not self._stack
        return True

    def _value(self, character: str) -> bool:
        if character == '"':
            self._state, self._then = self._string, self._after_value
        elif character in "{[":
            return self._open(character)
        elif character in _LITERALS:
            self._state, self._literal = self._in_literal, _LITERALS[character]
        elif character == "-":
            self._state = self._minus
        elif character in _DIGITS:
            self._state = self._zero if character == "0" else self._integer
        else:
            return character in SPACE
        return True

    def _first_item(self, character: str) -> bool:
        return self._close(character) if character == "]" else self._value(character)

    def _first_key(self, character: str) -> bool:
        return self._close(character) if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._state, self._then = self._string, self._colon
            return True
        return character in SPACE

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._state = self._value
            return True
        return character in SPACE

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._state = self._key if self._stack[-1] == "{" else self._value
            return True
        return self._close(character) if character in "}]" else character in SPACE

    def _string(self, character: str) -> bool:
        if character == '"':
            self._state = self._then
        elif character == "\\":
            self._state = self._escape
        return True

    def _escape(self, character: str) -> bool:
        if character == "u":
            self._state, self._num_hex = self._hex, 4
            return True
        self._state = self._string
        return character in _ESCAPES

    def _hex(self, character: str) -> bool:
        self._num_hex -= 1
        if not self._num_hex:
            self._state = self._string
        return character in "0123456789abcdefABCDEF"

    def _in_literal(self, character: str) -> bool:
        if not self._literal.startswith(character):
            return False
        self._literal = self._literal[1:]
        if not self._literal:
            self._state = self._after_value
        return True

    def _minus(self, character: str) -> bool:
        self._state = self._zero if character == "0" else self._integer
        return character in _DIGITS

    def _zero(self, character: str) -> bool:
        if character == ".":
            self._state = self._point
            return True
        return self._fraction(character) if character not in _DIGITS else False

    def _integer(self, character: str) -> bool:
        return character in _DIGITS or self._zero(character)

    def _point(self, character: str) -> bool:
        self._state = self._fraction
        return character in _DIGITS

    def _fraction(self, character: str) -> bool:
        if character in "eE":
            self._state = self._exponent
            return True
        return self._exponent_digits(character)

    def _exponent(self, character: str) -> bool:
        if character in "+-":
            self._state = self._exponent_sign
            return True
        return self._exponent_sign(character)

    def _exponent_sign(self, character: str) -> bool:
        self._state = self._exponent_digits
        return character in _DIGITS

    def _exponent_digits(self, character: str) -> bool:
        if character in _DIGITS:
            return True
        self._state = self._after_value
        return self._after_value(character)


class StringDecoder:
    """The inside of one JSON string, a character at a time. Half a surrogate pair stays an escape."""

    def __init__(self) -> None:
        self._escape = ""  # what has come of one
        self._high = 0  # the first half of a pair

    @property
    def in_escape(self) -> bool:
        return bool(self._escape)

    def add(self, character: str) -> str:
        """Raises ValueError where it is no escape that JSON knows."""
        if not self._escape:
            if character == "\\":
                self._escape = character
                return ""
            return self.finish() + character
        self._escape += character
        if self._escape[1] != "u":
            self._escape = ""
            if character not in _ESCAPES:
                raise ValueError("no escape")
            return self.finish() + _ESCAPES[character]
        return self._unicode() if len(self._escape) == len("\\u0000") else ""

    def finish(self) -> str:
        high, self._high = self._high, 0
        return f"\\u{high:04x}" if high else ""

    def _unicode(self) -> str:
        digits, self._escape = self._escape[2:], ""
        if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            raise ValueError("no escape")
        code = int(digits, 16)
        if self._high and 0xDC00 <= code < 0xE000:
            pair = 0x10000 + ((self._high - 0xD800) << 10) + (code - 0xDC00)
            self._high = 0
            return chr(pair)
        before = self.finish()
        if 0xD800 <= code < 0xDC00:
            self._high = code
            return before
        return before + (f"\\u{code:04x}" if 0xDC00 <= code < 0xE000 else chr(code))
