"""Raw window: tokens of a running sequence that are never encoded.

A module of its own without MLX, because settings take their defaults from it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RawWindow:
    """The first and the newest tokens of a sequence, which stay raw while it runs."""

    first_tokens: int = 4
    recent_tokens: int = 128
