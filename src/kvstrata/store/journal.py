"""Which entries have changed. What is known of all entries is kept up to date by looking at those few alone, so that a
step of the engine costs the same with ten entries and with thousands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvstrata.store.entry import Entry


class Changed:
    """One reader's list: every entry that has changed since it was last taken, once."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Entry, None] = OrderedDict()

    def add(self, entry: Entry) -> None:
        self._entries[entry] = None

    def take(self) -> Iterator[Entry]:
        """In the order in which they changed first. What is not asked for stays on the list."""
        while self._entries:
            yield self._entries.popitem(last=False)[0]


class Journal:
    def __init__(self) -> None:
        self._readers: list[Changed] = []

    def reader(self) -> Changed:
        """A list of its own, of what changes from now on."""
        self._readers.append(Changed())
        return self._readers[-1]

    def note(self, entry: Entry) -> None:
        """Its size, its tokens, its use, its precision, or whether it is there at all."""
        for reader in self._readers:
            reader.add(entry)

    def note_all(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.note(entry)
