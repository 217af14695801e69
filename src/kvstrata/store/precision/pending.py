"""What the work that waits is about to free, as a running sum: asking costs what has changed since the last time."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.store.entry import Entry
from kvstrata.store.journal import Journal


class Pending:
    """`bytes_of` tells what work on an entry would free, `waits` whether it is to be done."""

    def __init__(self, journal: Journal, waits: Callable[[Entry], bool], bytes_of: Callable[[Entry], int]) -> None:
        self._changed = journal.reader(self._forget)
        self._waits = waits
        self._bytes_of = bytes_of
        self._shares: dict[Entry, int] = {}
        self._total = 0

    def nbytes(self) -> int:
        for entry in self._changed.take():
            self._forget(entry)
            if self._waits(entry):
                self._shares[entry] = self._bytes_of(entry)
                self._total += self._shares[entry]
        return self._total

    def _forget(self, entry: Entry) -> None:
        self._total -= self._shares.pop(entry, 0)
