"""The replicas as the front sees them. Code for a cluster implements this (`ray/`); the front knows no more of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.types import Message


class ReplicaLost(Exception):
    """It ended, or cannot be reached. What it had not answered has no answer."""


class Replicas(Protocol):
    def names(self) -> tuple[str, ...]:
        """Those that take requests now."""
        ...

    def ask(self, name: str | None, request: Mapping[str, Any], body: bytes, *, only: bool) -> AsyncIterator[Message]:
        """The messages of its answer. `name` None: any; `only`: this one and no other. Raises ReplicaLost."""
        ...
