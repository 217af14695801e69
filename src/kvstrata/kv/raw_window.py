"""Which tokens of a running sequence are never encoded. Imports nothing: settings take their defaults from here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RawWindow:
    """The first tokens of a sequence, and its newest."""

    first_tokens: int = 4
    recent_tokens: int = 128
