"""The raw window: tokens of a running sequence that are never encoded. No imports: settings take defaults from here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RawWindow:
    """The first tokens of a sequence and its newest tokens, which stay raw."""

    first_tokens: int = 4
    recent_tokens: int = 128
