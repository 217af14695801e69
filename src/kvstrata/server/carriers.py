"""Interface for session data besides the KV cache that is exported and imported with a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvstrata.engine.cache_api import TokenIds
from kvstrata.server.sessions.session import Session

Section = Sequence[Mapping[str, Any]]  # JSON objects


class Carrier(Protocol):
    @property
    def name(self) -> str:
        """Name of the carrier's section in the file, such as `replies`."""
        ...

    def give(self, session: Session, ids: TokenIds) -> Section:
        """Return the section of a session. `ids`: tokens of the exported conversation."""
        ...

    def take(self, session: Session, section: Section) -> None:
        """Import the section of a file. The file is untrusted: validate everything, and skip invalid entries without
        raising."""
        ...
