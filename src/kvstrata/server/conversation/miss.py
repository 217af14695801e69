"""The header that says why not more of a prompt was cached, and what was done to it on the way.

    x-kvstrata-miss: diverged; at=1204; was="12:31"; now="12:32"; replayed=3

A word of the store first, then notes. Knows what a header can carry; does not know what the words mean.
"""

from __future__ import annotations

from collections.abc import Mapping

MISS = "x-kvstrata-miss"
MAX_NOTE_CHARS = 120


def miss_value(miss: str, notes: Mapping[str, str]) -> str:
    return "; ".join([miss, *(f"{name}={_noted(value)}" for name, value in notes.items())])


def _noted(value: str) -> str:
    """Words and numbers as they are, all else in quotes; headers carry printable ASCII."""
    if value and value.isascii() and value.replace("+", "").replace("_", "").isalnum():
        return value
    text = value[:MAX_NOTE_CHARS].encode("unicode_escape").decode("ascii")
    return '"' + text.replace('"', "'") + '"'
