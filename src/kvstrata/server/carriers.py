"""What else belongs to a session and goes along when it is exported. Knows the interface only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvstrata.engine.cache_api import TokenIds
from kvstrata.server.sessions.session import Session

Section = Sequence[Mapping[str, Any]]  # JSON objects


class Carrier(Protocol):
    @property
    def name(self) -> str:
        """Of its section in the file, such as `replies`."""
        ...

    def give(self, session: Session, ids: TokenIds) -> Section:
        """Return the section of a session. `ids`: tokens of the exported conversation."""
        ...

    def take(self, session: Session, section: Section) -> None:
        """What a file had. Anyone may have made it: trust nothing in it, and raise nothing for what is of no use."""
        ...
