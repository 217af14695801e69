"""Why a prompt is found only so far. Reads the index, what was evicted and what the disk said."""

from __future__ import annotations

from kvstrata.index.ids import TokenIds, Tokens, as_ids
from kvstrata.index.tree import Divergence
from kvstrata.store.cold.cold import Cold
from kvstrata.store.cold.sharing import Shared
from kvstrata.store.entry import Found
from kvstrata.store.evictor import Evictor
from kvstrata.store.report import Ending, Explanation
from kvstrata.store.search import Search
from kvstrata.store.shelf import Shelf
from kvstrata.tier.chains import OnDisk
from kvstrata.tier.lookups import Lookup, answered


class Explainer:
    def __init__(self, shelf: Shelf, search: Search, evictor: Evictor, cold: Cold, shared: Shared | None) -> None:
        self._shelf = shelf
        self._search = search
        self._evictor = evictor
        self._cold = cold
        self._shared = shared

    def ask_disk(self, tokens: Tokens, salt: str) -> Lookup[OnDisk | None]:
        """What the disk has to say about a prompt."""
        return self._cold.about(self._search.root_of(salt), as_ids(tokens)[:-1])

    def ask_shared(self, tokens: Tokens, salt: str) -> Lookup[OnDisk | None]:
        """The same of the tier that other servers share."""
        if self._shared is None:
            return answered(None)
        return self._shared.cold.about(self._search.root_of(salt), as_ids(tokens)[:-1])

    def explain(
        self, tokens: Tokens, salt: str, on_disk: OnDisk | None = None, in_shared: OnDisk | None = None
    ) -> Explanation:
        """How much of a prompt is there, and why not more. The last token is always computed. `on_disk`, `in_shared`:
        what these tiers said; None: they were not asked."""
        self._evictor.expire()
        ids, key = as_ids(tokens)[:-1], self._search.root_of(salt)
        found = self._search.find(ids, salt)
        by_tier = {"hot": found.num_tokens}
        if on_disk is not None:
            by_tier["disk"] = max(0, on_disk.num_tokens - found.num_tokens)
        if in_shared is not None:
            by_tier["remote"] = max(0, in_shared.num_tokens - sum(by_tier.values()))
        cached = sum(by_tier.values())
        diverged = self._shelf.tree.diverged(key, ids)
        because: Ending = "complete" if cached == len(ids) else self._ending(key, ids, found, diverged)
        if on_disk is not None and because != "complete":
            because = _ending_on_disk(on_disk, because)
        at = cached if because == "mark" else max(cached, found.matched_tokens)
        parted = diverged if because == "diverged" and diverged.num_tokens == at else Divergence(at, (), 0, True)
        paused = "" if self._shared is None else self._shared.tier.writing().paused_because
        return Explanation(len(ids) + 1, cached, by_tier, because, at, parted.instead, parted.num_instead, paused)

    def miss(self, tokens: Tokens, salt: str) -> str:
        """Why not more of a prompt is in memory."""
        ids, key = as_ids(tokens)[:-1], self._search.root_of(salt)
        return self._ending(key, ids, self._search.find(ids, salt), self._shelf.tree.diverged(key, ids))

    def _ending(self, key: bytes, ids: TokenIds, found: Found, diverged: Divergence) -> Ending:
        """`ids`: a prompt but for its last token."""
        if found.num_tokens == len(ids):
            return "complete"
        if self._shelf.ghosts.match(key, ids).num_tokens > found.matched_tokens:
            return "evicted"
        if found.matched_tokens > found.num_tokens:
            return "mark"
        if not diverged.is_root_known:
            return "empty"
        return "diverged" if diverged.instead else "new"


class ForeignExplainer(Explainer):
    """Of a model whose caches cannot be shared."""

    def explain(
        self, tokens: Tokens, salt: str, on_disk: OnDisk | None = None, in_shared: OnDisk | None = None
    ) -> Explanation:
        del salt, on_disk, in_shared
        return Explanation(len(tokens), 0, {}, "foreign", 0)

    def miss(self, tokens: Tokens, salt: str) -> str:
        del tokens, salt
        return ""


def _ending_on_disk(on_disk: OnDisk, because: Ending) -> Ending:
    if on_disk.is_damaged_next:
        return "damaged"
    return "identity" if because == "empty" and on_disk.has_others_only else because
