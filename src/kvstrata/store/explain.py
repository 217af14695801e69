"""Why a prompt is found only so far. Reads the index, what was evicted and the disk; changes nothing."""

from __future__ import annotations

from kvstrata.index.ids import TokenIds
from kvstrata.index.tree import Divergence
from kvstrata.store.cold import Cold
from kvstrata.store.entry import Found
from kvstrata.store.report import Ending, Explanation
from kvstrata.store.shelf import Shelf


def explain(shelf: Shelf, cold: Cold | None, key: bytes, ids: TokenIds, found: Found) -> Explanation:
    """`ids`: a prompt but for its last token, which is always computed. `found`: what memory has of it."""
    by_tier = {"hot": found.num_tokens}
    if cold is not None:
        by_tier["disk"] = max(0, cold.match(key, ids).num_tokens - found.num_tokens)
    cached = sum(by_tier.values())
    diverged = shelf.tree.diverged(key, ids)
    because: Ending = "complete" if cached == len(ids) else ending(shelf, key, ids, found, diverged)
    if cold is not None and because != "complete":
        because = _ending_on_disk(cold, key, ids, because)
    at = cached if because == "mark" else max(cached, found.matched_tokens)
    parted = diverged if because == "diverged" and diverged.num_tokens == at else Divergence(at, (), 0, True)
    return Explanation(len(ids) + 1, cached, by_tier, because, at, parted.instead, parted.num_instead)


def ending(shelf: Shelf, key: bytes, ids: TokenIds, found: Found, diverged: Divergence) -> Ending:
    """Why not more of it is in memory."""
    if found.num_tokens == len(ids):
        return "complete"
    if shelf.ghosts.match(key, ids).num_tokens > found.matched_tokens:
        return "evicted"
    if found.matched_tokens > found.num_tokens:
        return "mark"
    if not diverged.is_root_known:
        return "empty"
    return "diverged" if diverged.instead else "new"


def _ending_on_disk(cold: Cold, key: bytes, ids: TokenIds, because: Ending) -> Ending:
    if cold.is_damaged_next(key, ids):
        return "damaged"
    # Whose the other blocks are is nobody's business: not even whether they have these tokens is looked at.
    return "identity" if because == "empty" and cold.has_others_only(key) else because
