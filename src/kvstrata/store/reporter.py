"""What the store holds and what happened to it, for people and for dashboards. Changes nothing."""

from __future__ import annotations

from collections import Counter

from kvstrata.index.identity import owner_of
from kvstrata.store.cold.cold import Cold
from kvstrata.store.cold.sharing import Shared
from kvstrata.store.report import TierUsage, disk_counts, disk_usage, remote_counts
from kvstrata.store.search import Search
from kvstrata.store.shelf import Shelf
from kvstrata.store.totals import Totals
from kvstrata.tier.base import SharedUsage


class Reporter:
    def __init__(self, shelf: Shelf, search: Search, cold: Cold, shared: Shared | None, counters: Counter[str]) -> None:
        self._totals = Totals(shelf.journal)
        self._search = search
        self._cold = cold
        self._shared = shared
        self._counters = counters

    def usage(self, owner: str | None = None) -> TierUsage:
        """Of what is in memory under an owner's salts; None: under all."""
        return self._totals.usage(lambda salt: owner is None or owner_of(salt) == owner)

    def disk_usage(self, owner: str | None = None) -> TierUsage | None:
        """None: there is no disk."""
        if not self._cold.has_tier:
            return None
        usage = self._cold.tier.usage(self._search.roots_begin(None, owner))
        # Files that were cleared and are being deleted are told by `disk_counts`.
        return disk_usage(usage, usage.disk_bytes - usage.leaving_bytes if owner is None else usage.block_bytes)

    def shared_usage(self) -> SharedUsage | None:
        """None: there is no tier that others share."""
        return None if self._shared is None else self._shared.tier.shared_usage()

    def count(self) -> dict[str, int]:
        """What happened since the start."""
        counts = dict(self._counters)
        if self._cold.has_tier:
            counts["unreadable_blocks"] = self._cold.loads.num_unreadable
            counts |= disk_counts(self._cold.tier.usage())
        if self._shared is not None:
            counts |= remote_counts(self._shared.tier.usage())
        return counts
