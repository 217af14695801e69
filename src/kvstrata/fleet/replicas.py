"""Interface between the router and its replicas. Cluster code implements it (`ray/`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.types import Message


class ReplicaLost(Exception):
    """The replica has ended or cannot be reached; its unfinished responses are lost."""


class Replicas(Protocol):
    def names(self) -> tuple[str, ...]:
        """Return the names of the replicas that accept requests now."""
        ...

    def ask(self, name: str | None, request: Mapping[str, Any], body: bytes, *, only: bool) -> AsyncIterator[Message]:
        """Yield the messages of a replica's response. Raises ReplicaLost.

        `name` None means any replica. With `only` no other replica may take the place of the named one.
        """
        ...
