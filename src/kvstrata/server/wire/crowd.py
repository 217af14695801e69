"""Choice of the connection to close when there are too many. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

# The headers of a well-behaved client arrive within this time; a slower one has no priority over a new connection.
HEADERS_S = 1.0


class Waiting(Protocol):
    @property
    def is_idle(self) -> bool:
        """Whether the connection is kept open between two requests."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether any byte of a request has arrived."""
        ...

    @property
    def waits_since(self) -> float | None:
        """The loop time at which the connection began to wait for a request, or None while it has one."""
        ...


W = TypeVar("W", bound=Waiting)


def gives_way(connections: Iterable[W], now: float) -> W | None:
    """Return the connection to close, or None: first idle ones, then those that have sent nothing, then those with slow
    headers; among equals the one that has waited longest."""
    ranked = [(_rank(each), since, each) for each in connections if (since := each.waits_since) is not None]
    able = [(rank, since, each) for rank, since, each in ranked if rank < 2 or since <= now - HEADERS_S]
    return min(able, key=lambda each: each[:2])[2] if able else None


def _rank(each: Waiting) -> int:
    if each.is_idle:
        return 0
    return 2 if each.has_begun else 1
