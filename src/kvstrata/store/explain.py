"""Why a prompt is found only so far. Reads the index, what was evicted and what the disk said; changes nothing."""

from __future__ import annotations

from kvstrata.index.ids import TokenIds
from kvstrata.index.tree import Divergence
from kvstrata.store.entry import Found
from kvstrata.store.report import Ending, Explanation
from kvstrata.store.shelf import Shelf
from kvstrata.tier.chains import OnDisk


def explain(shelf: Shelf, on_disk: OnDisk | None, key: bytes, ids: TokenIds, found: Found) -> Explanation:
    """`ids`: a prompt but for its last token, which is always computed. `found`: what memory has of it, `on_disk`: what
    the disk said about it."""
    by_tier = {"hot": found.num_tokens}
    if on_disk is not None:
        by_tier["disk"] = max(0, on_disk.num_tokens - found.num_tokens)
    cached = sum(by_tier.values())
    diverged = shelf.tree.diverged(key, ids)
    because: Ending = "complete" if cached == len(ids) else ending(shelf, key, ids, found, diverged)
    if on_disk is not None and because != "complete":
        because = _ending_on_disk(on_disk, because)
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


def _ending_on_disk(on_disk: OnDisk, because: Ending) -> Ending:
    if on_disk.is_damaged_next:
        return "damaged"
    return "identity" if because == "empty" and on_disk.has_others_only else because
