"""Drops what is stored, in memory and on the disk, because a caller asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstrata.store.cold.cold import Cold
from kvstrata.store.cold.spills import Spills
from kvstrata.store.evictor import Evictor
from kvstrata.store.search import Search
from kvstrata.store.shelf import Shelf


@dataclass(frozen=True)
class Cleared:
    nbytes: int
    tokens: int


class Clearing:
    def __init__(self, search: Search, shelf: Shelf, evictor: Evictor, spills: Spills, cold: Cold) -> None:
        self._search = search
        self._shelf = shelf
        self._evictor = evictor
        self._spills = spills
        self._cold = cold

    def clear(
        self, salt: str | None = None, tier: Literal["hot", "disk", "all"] = "all", *, owner: str | None = None
    ) -> Cleared:
        """Drop all that is free to go in memory and all on the disk; or only under one salt, or an owner's salts."""
        under = self._search.roots_begin(salt, owner)
        before, tokens = self._shelf.held_bytes, self._shelf.tree.num_tokens
        if tier != "disk":
            self._evictor.clear(under)
        hot = Cleared(before - self._shelf.held_bytes, tokens - self._shelf.tree.num_tokens)
        if tier == "hot":
            return hot
        self._spills.give_up(under)
        for entry in self._shelf.entries:
            if entry.root_key.startswith(under):
                self._shelf.set_clean(entry, is_clean=False)
        removed = self._cold.tier.clear(under)
        return Cleared(hot.nbytes + removed.disk_bytes, hot.tokens + removed.num_tokens)
