"""Who keeps entries from going: each lease counts once on every entry that it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstrata.eviction.worth import Kind
from kvstrata.store.entry import Entry, Lease
from kvstrata.store.shelf import Shelf


class Leases:
    """`review` is told of what is leased no more: maybe it should be stored in another way now."""

    def __init__(self, shelf: Shelf, review: Callable[[Entry], None]) -> None:
        self._shelf = shelf
        self._review = review

    def hold(self, entries: Iterable[Entry]) -> Lease:
        """Keep these while a request waits that would go on from them."""
        lease = Lease(Kind.CONTINUED)
        self.extend(lease, entries)
        return lease

    def extend(self, lease: Lease, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry not in lease.entries:
                lease.entries.add(entry)
                self._shelf.change(entry, num_leases=entry.num_leases + 1)

    def release(self, lease: Lease) -> None:
        """Nothing happens the second time."""
        if not lease.is_open:
            return
        lease.is_open = False
        for entry in lease.entries:
            self._shelf.change(entry, num_leases=entry.num_leases - 1)
            self._review(entry)
