"""Which connection gives way when there are too many. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

# An honest client's headers arrive within this; one that takes longer has no better right than a new one.
HEADERS_S = 1.0


class Waiting(Protocol):
    @property
    def is_idle(self) -> bool:
        """Kept open between two requests."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether any byte of a request has come."""
        ...

    @property
    def waits_since(self) -> float | None:
        """When it began to wait for a request; None while it has one."""
        ...


W = TypeVar("W", bound=Waiting)


def gives_way(connections: Iterable[W], now: float) -> W | None:
    """An idle one, else one that has sent nothing yet, else one whose headers take too long. Always the longest."""
    ranked = [(_rank(each), since, each) for each in connections if (since := each.waits_since) is not None]
    able = [(rank, since, each) for rank, since, each in ranked if rank < 2 or since <= now - HEADERS_S]
    return min(able, key=lambda each: each[:2])[2] if able else None


def _rank(each: Waiting) -> int:
    if each.is_idle:
        return 0
    return 2 if each.has_begun else 1
