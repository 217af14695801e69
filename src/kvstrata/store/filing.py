"""What a running sequence computes itself, on its way into the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.index.ids import Tokens, as_ids
from kvstrata.spans.marks import Mark
from kvstrata.store.entry import Entry, Lease

if TYPE_CHECKING:
    from kvstrata.store.store import Store


class Filing:
    def __init__(self, store: Store, entry: Entry, lease: Lease) -> None:
        self._store = store
        self.entry = entry
        self.lease = lease  # on what it goes on from, and on what it was filed under since

    @property
    def entries(self) -> set[Entry]:
        """All that its sequence holds."""
        return {*self.lease.entries, self.entry}

    def seal(self, tokens: Tokens, mark: Mark | None = None, *, is_end: bool = False) -> None:
        """From now on others may go on from `tokens`, all of the sequence so far. `is_end`: here a prompt ended."""
        self._store._seal(self, as_ids(tokens), mark)
        if is_end:
            self.entry.span.ends.add(len(tokens))

    def has_grown(self, num_tokens: int) -> None:
        """To so many tokens: maybe it should be held in fewer bits, or more of it should be encoded."""
        self._store.pressure.grown(self.entries, num_tokens)
        self._store._review(self.entry)

    def end(self) -> None:
        """The sequence writes no more."""
        self._store._end(self.entry)
        self._store.release(self.lease)
