"""Explanation of a prompt's cached prefix: how long it is, and why it ends there.

Reads the index, the record of evicted tokens, and what the tiers answered to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstrata.index.ids import TokenIds, Tokens, as_ids
from kvstrata.index.tree import Divergence
from kvstrata.store.entry import Found
from kvstrata.store.search import Search
from kvstrata.store.shelf import Shelf
from kvstrata.tier.chains import OnDisk

# complete  all that can be found was: the last prompt token is always computed
# new       what is stored ends there: the rest was never seen
# diverged  something else is stored there
# evicted   it was stored, and had to go
# mark      more is stored, but the model cannot be resumed there
# damaged   the next block was on the disk, and was not what it said
# salt      it is stored under another salt of the same caller
# empty     nothing is stored for this model and salt
# identity  nothing is; the disk has blocks of other models, settings or salts only
# foreign   the model brings caches that cannot be shared
Ending = Literal["complete", "new", "diverged", "evicted", "mark", "damaged", "salt", "empty", "identity", "foreign"]


@dataclass(frozen=True)
class Explanation:
    prompt_tokens: int
    cached_tokens: int
    by_tier: dict[str, int]
    ends_because: Ending
    at_token: int  # the first that is not cached
    instead: tuple[tuple[int, ...], ...] = ()  # how what is stored goes on from that position: a few ways
    num_instead: int = 0  # how many ways there are
    remote_paused_because: str = ""  # why the tier that servers share is left alone; empty: it is not


class Explainer:
    def __init__(self, shelf: Shelf, search: Search) -> None:
        self._shelf = shelf
        self._search = search

    def explain(
        self,
        tokens: Tokens,
        salt: str,
        on_disk: OnDisk | None = None,
        in_shared: OnDisk | None = None,
        remote_paused_because: str = "",
    ) -> Explanation:
        """Explain how much of a prompt is cached, and why not more. The last token is always computed. `on_disk`,
        `in_shared`: the answers of these tiers; None: they were not asked."""
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
        instead = parted.instead, parted.num_instead
        return Explanation(len(ids) + 1, cached, by_tier, because, at, *instead, remote_paused_because)

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
        self,
        tokens: Tokens,
        salt: str,
        on_disk: OnDisk | None = None,
        in_shared: OnDisk | None = None,
        remote_paused_because: str = "",
    ) -> Explanation:
        del salt, on_disk, in_shared, remote_paused_because
        return Explanation(len(tokens), 0, {}, "foreign", 0)

    def miss(self, tokens: Tokens, salt: str) -> str:
        del tokens, salt
        return ""


def _ending_on_disk(on_disk: OnDisk, because: Ending) -> Ending:
    if on_disk.is_damaged_next:
        return "damaged"
    return "identity" if because == "empty" and on_disk.has_others_only else because
