"""Incremental extraction of a free-text tool's input from the JSON arguments that the model writes.

Models call such a tool like a function, with {"input": "..."}. Arguments of another form are handled at the end of the
call.
"""

from __future__ import annotations

import json
import re

from kvstrata.server.responses.tools import FREE_TEXT

_BEFORE = ("{", f'"{FREE_TEXT}"', ":", '"')
_HIGH = r"[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf"\\u({_HIGH})\\u({_LOW})|\\u([0-9a-fA-F]{{4}})|\\([^u])")
# An incomplete escape at the end of the text: a part of one, or the first of a surrogate pair.
_BEGUN = re.compile(rf"\\(u(?:[0-9a-fA-F]{{0,3}}|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?)?\Z")
_PLAIN = re.compile(r'[^"\\]+')
_MEANT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class FreeText:
    """A parser that reads each character once. Arguments of another form are collected and returned at the end."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._expected = list(_BEFORE)  # tokens before the text
        self._held = ""  # not decoded yet
        self._state = "before"

    def add(self, piece: str) -> str:
        """Return the part of the input that a piece of the arguments adds."""
        if self._state in ("before", "other"):
            self._pieces.append(piece)
        self._held += piece
        if self._state == "before":
            self._skip()
        if self._state == "inside":
            return self._unescape()
        if self._state != "before":
            self._held = ""
        return ""

    def finish(self) -> str:
        """Return the rest of the input at the end of the call."""
        if self._state in ("before", "other"):
            return _input_of("".join(self._pieces))
        held, self._held = self._held, ""
        return held if self._state == "inside" else ""

    def _skip(self) -> None:
        while self._expected:
            rest = self._held.lstrip(" \t\r\n")
            wanted = self._expected[0]
            if rest.startswith(wanted):
                self._held = rest[len(wanted) :]
                self._expected.pop(0)
            else:
                self._held = rest
                if not wanted.startswith(rest):
                    self._state = "other"
                return
        self._state = "inside"
        self._pieces.clear()

    def _unescape(self) -> str:
        out: list[str] = []
        text, at = self._held, 0
        while at < len(text):
            if plain := _PLAIN.match(text, at):
                out.append(plain[0])
                at = plain.end()
            elif text[at] == '"':
                self._state, at = "after", len(text)
            elif _BEGUN.match(text, at):
                break
            elif escape := _ESCAPE.match(text, at):
                out.append(_unescaped(escape))
                at = escape.end()
            else:  # invalid JSON: keep it as it was written
                out.append(text[at])
                at += 1
        self._held = text[at:]
        return "".join(out)


def _unescaped(escape: re.Match[str]) -> str:
    high, low, single, letter = escape.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))
    if single:
        code = int(single, 16)
        return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)
    return _MEANT.get(letter, letter)


def _input_of(arguments: str) -> str:
    """Return the input of a call in another form: the text under the right name or of the only member, else all
    arguments."""
    try:
        parsed = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed, dict):
        return arguments
    values = [parsed[FREE_TEXT]] if FREE_TEXT in parsed else list(parsed.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments
