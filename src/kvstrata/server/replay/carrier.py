"""Export and import of a session's remembered replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstrata.engine.cache_api import TokenIds
from kvstrata.server.replay.memory import ReplyMemory
from kvstrata.server.replay.record import Record, record_of
from kvstrata.server.sessions.session import Session

ID_BYTES = 4


class ReplyCarrier:
    name = "replies"

    def __init__(self, memory: ReplyMemory, vocab_size: int) -> None:
        self._memory = memory
        self._vocab_size = vocab_size

    def give(self, session: Session, ids: TokenIds) -> list[Mapping[str, Any]]:
        """Return the replies whose tokens the conversation contains, with their thinking or without."""
        held = np.asarray(ids, dtype="<i4").tobytes()

        def is_within(record: Record) -> bool:
            ids = np.array(record.ids[record.visible_from or 0 :], dtype="<i4").tobytes()
            return _has_run(held, ids)

        return [record.to_json() for record in self._memory.within(session.salt, is_within)]

    def take(self, session: Session, section: Sequence[Mapping[str, Any]]) -> None:
        """Import the valid records of a section. Whether their ids match their text is verified when a client sends
        such a reply: only then are the tools known too."""
        records = (record_of(value, self._vocab_size) for value in section)
        self._memory.take(session.salt, [record for record in records if record is not None])


def _has_run(held: bytes, ids: bytes) -> bool:
    at = held.find(ids)
    while at > 0 and at % ID_BYTES:
        at = held.find(ids, at + 1)
    return at >= 0
