"""Dirty sets of entries: what is known of all entries is kept up to date by looking at those few that have changed, so
that a step of the engine costs the same with ten entries and with thousands.

A dirty set holds entries of the entry table only. An entry that is removed from the table leaves every dirty set at
once, and each reader is told, so that a reader that takes its entries seldom, or never, keeps no removed entry alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator

from kvstrata.store.entry import Entry


class Changed:
    """Dirty set of one reader: every held entry that has changed since the reader last took it, once. `held` is the
    entry table; `on_removed` is called with an entry that has left it."""

    def __init__(self, held: Container[Entry], on_removed: Callable[[Entry], None]) -> None:
        self._held = held
        self._on_removed = on_removed
        self._entries: OrderedDict[Entry, None] = OrderedDict()

    def add(self, entry: Entry) -> None:
        if entry in self._held:
            self._entries[entry] = None

    def remove(self, entry: Entry) -> None:
        """Forget an entry that has left the entry table."""
        self._entries.pop(entry, None)
        self._on_removed(entry)

    def take(self) -> Iterator[Entry]:
        """In the order in which they changed first. What is not asked for stays on the list."""
        while self._entries:
            yield self._entries.popitem(last=False)[0]


class Journal:
    """`held`: the entry table."""

    def __init__(self, held: Container[Entry]) -> None:
        self._held = held
        self._readers: list[Changed] = []

    def reader(self, on_removed: Callable[[Entry], None]) -> Changed:
        """A list of its own, of what changes from now on. `on_removed`: see `Changed`."""
        self._readers.append(Changed(self._held, on_removed))
        return self._readers[-1]

    def note(self, entry: Entry) -> None:
        """Its size, its tokens, its use, its precision, or whether it is there at all."""
        for reader in self._readers:
            reader.add(entry)

    def note_all(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.note(entry)

    def remove(self, entry: Entry) -> None:
        """Drop an entry that has left the entry table from every dirty set, and tell the readers."""
        for reader in self._readers:
            reader.remove(entry)
