"""The header that says why no more of a prompt was cached, and how the prompt was changed.

    x-kvstrata-miss: diverged; at=1204; was="12:31"; now="12:32"; replayed=3

The cache's reason comes first, then notes. Encodes values for a header; does not interpret them.
"""

from __future__ import annotations

from collections.abc import Mapping

MISS = "x-kvstrata-miss"
MAX_NOTE_CHARS = 120


def miss_value(miss: str, notes: Mapping[str, str]) -> str:
    return "; ".join([miss, *(f"{name}={_noted(value)}" for name, value in notes.items())])


def _noted(value: str) -> str:
    """Return a value for the header: words and numbers unchanged, other text quoted and escaped to printable ASCII."""
    if value and value.isascii() and value.replace("+", "").replace("_", "").isalnum():
        return value
    text = value[:MAX_NOTE_CHARS].encode("unicode_escape").decode("ascii")
    return '"' + text.replace('"', "'") + '"'
