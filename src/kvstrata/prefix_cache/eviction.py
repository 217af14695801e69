"""Eviction of leaves, removal on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import Checkpoints, EntryTable, EvictionCandidates
from kvstrata.prefix_cache.jobs import FailureLog
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.offload import DropCounters, Handover, Offloader
from kvstrata.prefix_cache.radix_tree import Match, Node
from kvstrata.prefix_cache.tier_client import TierClient
from kvstrata.prefix_cache.transcode import Transcoder
from kvstrata.tier.base import Removed
from kvstrata.tier.lookups import Lookup, answered


class Evictor:
    def __init__(
        self,
        shelf: EntryTable,
        leaves: EvictionCandidates,
        marks: Checkpoints,
        spills: Offloader,
        rewriting: Transcoder,
        losses: DropCounters,
        failures: FailureLog,
    ) -> None:
        self._shelf = shelf
        self._leaves = leaves
        self._marks = marks
        self._spills = spills
        self._losses = losses
        self._rewriting = rewriting
        self._failures = failures

    def expire(self) -> None:
        """Let go of what no request asked for in time."""
        self.shrink_to(self._shelf.nbytes)

    def shrink_to(
        self,
        limit_bytes: int,
        may_go: Callable[[Node[Entry]], bool] = lambda _: True,
        *,
        spare_only: bool = False,
        until_s: float = math.inf,
    ) -> None:
        """Evict what has expired, and from the leaves until no more than this is held, or only what is in use. It ends
        at the first leaf of which `may_go` says no. `spare_only`: none but those that the disk has too, or that
        are superseded. `until_s`: see `evict`."""
        while True:
            chosen = self._leaves.choose(self._shelf.nbytes - limit_bytes, spare_only=spare_only)
            # While one is written or removed, others may grow upward: what goes is known by its position.
            ends = [(each.leaf, each.leaf.start + each.keep_tokens) for each in chosen]
            for leaf, end in ends:
                if not self._leaves.has_expired(leaf) and not may_go(leaf):
                    self._leaves.offer_node(leaf)
                    return
                self.evict_leaf(leaf, end, until_s)
            if not chosen:
                return

    def drop_superseded(self) -> None:
        """What conversations have left behind is not to be written at the end."""
        for node in self._leaves.superseded():
            if node.is_leaf and node.payload.is_evictable:
                self.evict_leaf(node, node.start)

    def keep_arrays_few(self, until_s: float = math.inf) -> None:
        """What is worth least goes while there are more arrays than the machine allows. `until_s`: see `evict`."""
        while self._shelf.has_too_many_arrays and (chosen := self._leaves.choose(1)):
            for each in chosen:
                self.evict_leaf(each.leaf, each.leaf.start, until_s)

    def clear(self, under: bytes = b"") -> None:
        """Remove every leaf that is free to go, and what becomes one by it; under all roots that begin so."""
        shelf = self._shelf
        nodes = [node for root in shelf.tree.root_keys if root.startswith(under) for node in shelf.tree.nodes(root)]
        # Children before their parents.
        for node in reversed(nodes):
            if node in node.payload.nodes and node.is_leaf and node.payload.is_evictable:
                shelf.remove_leaf(node)
        for root in shelf.ghosts.root_keys:
            if root.startswith(under):
                shelf.ghosts.drop(root)

    def evict_leaf(self, leaf: Node[Entry], end: int, until_s: float = math.inf) -> None:
        """What a leaf has from a position on. Until `until_s` it may be encoded before it is handed to the disk; what
        is not encoded by then is handed over as it is."""
        has_expired = self._leaves.has_expired(leaf)
        handed = Handover(leaf.start, "expired") if has_expired else self.write_first(leaf, until_s, goes_now=True)
        end = self._marks.usable_end(leaf, end)
        keeps_some = leaf.start < end < leaf.end
        goes_from = end if keeps_some else leaf.start
        lost_tokens = max(0, leaf.end - max(goes_from, handed.end))
        self._losses.record_eviction(leaf.payload, lost_tokens, handed.reason, num_tokens=leaf.end - goes_from)
        if keeps_some:
            self._shelf.trim_leaf(leaf, end)
            if self._rewriting.precision.options.gathers:
                # What is left of it may be stored in fewer arrays.
                self._rewriting.jobs.add(leaf.payload)
        else:
            self._shelf.remove_leaf(leaf)

    def write_first(self, leaf: Node[Entry], until_s: float = math.inf, *, goes_now: bool = False) -> Handover:
        """Encode a leaf that is to go and give it to the disk, as far as that can be done until then. `goes_now`: all
        of it is written; what is not encoded by then is written as it is. Where that fails, the leaf can go all the
        same."""
        failed = Handover(leaf.start, "disk_failed")
        return self._failures.attempt("spills", lambda: self._write_first(leaf, until_s, goes_now=goes_now), failed)

    def _write_first(self, leaf: Node[Entry], until_s: float, *, goes_now: bool) -> Handover:
        if self._spills.wants(leaf):
            # Spans may be joined: the leaf may be another's afterwards.
            self._rewriting.finish_path(leaf, until_s)
        is_transcoding = self._rewriting.jobs.has(leaf.payload)
        return self._spills.write_leaf(leaf, until_s, is_transcoding=is_transcoding, must_evict=goes_now)


@dataclass(frozen=True)
class Cleared:
    nbytes: int
    tokens: int


class Clearing:
    def __init__(
        self, search: PrefixMatcher, shelf: EntryTable, evictor: Evictor, spills: Offloader, cold: TierClient
    ) -> None:
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
        before, tokens = self._shelf.nbytes, self._shelf.tree.num_tokens
        if tier != "disk":
            self._evictor.clear(under)
        hot = Cleared(before - self._shelf.nbytes, tokens - self._shelf.tree.num_tokens)
        if tier == "hot":
            return hot
        self._spills.cancel_writes(under)
        for entry in self._shelf.entries:
            if entry.root_key.startswith(under):
                self._shelf.set_archived(entry, is_archived=False)
        removed = self._cold.tier.clear(under)
        return Cleared(hot.nbytes + removed.disk_bytes, hot.tokens + removed.num_tokens)


KeptBecause = Literal["", "pinned", "running"]


@dataclass(frozen=True)
class Dropped:
    tokens: int  # in memory
    nbytes: int
    kept_because: KeptBecause  # nothing was dropped, because of this; empty: what could go has gone
    on_disk: Lookup[Removed]


class Dropping:
    def __init__(self, search: PrefixMatcher, shelf: EntryTable, cold: TierClient) -> None:
        self._search = search
        self._shelf = shelf
        self._cold = cold

    def drop(self, ids: TokenIds, salt: str, *, is_dry: bool) -> Dropped:
        """`is_dry`: only tell what would go."""
        root = self._search.root_of(salt)
        match = self._shelf.tree.match(root, ids)
        going = _own(match)
        last = match.path[-1] if match.path else None
        if last is not None and not going and last.is_leaf and last.end == match.num_tokens:
            return Dropped(0, 0, "pinned" if last.payload.is_pinned else "running", answered(Removed()))
        tokens, nbytes = sum(node.num_tokens for node in going), sum(_nbytes(node) for node in going)
        start = going[-1].start if going else match.num_tokens
        on_disk = self._cold.drop_chain(root, ids, start, is_dry=is_dry)
        if not is_dry:
            self._remove(going)
            self._forget(root, ids)
        return Dropped(tokens, nbytes, "", on_disk)

    def _remove(self, going: Sequence[Node[Entry]]) -> None:
        for node in going:
            self._shelf.remove_leaf(node)

    def _forget(self, root: bytes, ids: TokenIds) -> None:
        """It was not evicted: a later miss is not to be explained so."""
        match = self._shelf.ghosts.match(root, ids)
        last = match.path[-1] if match.path else None
        if last is not None and last.is_leaf and last.end == match.num_tokens:
            self._shelf.ghosts.remove(last)


def _own(match: Match[Entry]) -> list[Node[Entry]]:
    """The nodes that no other conversation has, the last one first, as far as they are free to go."""
    going: list[Node[Entry]] = []
    for node in reversed(match.path):
        if node.end > match.num_tokens or len(node.children) > bool(going) or not node.payload.is_evictable:
            break
        going.append(node)
    return going


def _nbytes(node: Node[Entry]) -> int:
    entry = node.payload
    return entry.nbytes * node.num_tokens // max(1, entry.span.num_tokens)
