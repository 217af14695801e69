"""Text from elsewhere, made safe to show: a terminal obeys control characters, and a line end begins a line of a log.

Such a character becomes what Python would write for it: \\x1b for escape.
"""

from __future__ import annotations

from typing import Any

_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0))}
_LINE_ENDS = {code: repr(chr(code))[1:-1] for code in (0x2028, 0x2029)}
_IN_TEXT = {code: escaped for code, escaped in _CONTROLS.items() if chr(code) not in "\n\t"}
_IN_LINE = _CONTROLS | _LINE_ENDS


def printable(text: str) -> str:
    """Return `text` without control characters. Line ends and tabs stay."""
    return text.translate(_IN_TEXT)


def printable_line(text: str) -> str:
    """Return `text` as one line without control characters."""
    return text.translate(_IN_LINE)


def printable_values(value: Any) -> Any:
    """Return a JSON value whose texts, but not its names, are printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_values(each) for each in value]
    if isinstance(value, dict):
        return {name: printable_values(each) for name, each in value.items()}
    return value
