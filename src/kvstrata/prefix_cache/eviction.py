"""Eviction of leaves, removal on request, and dropped-token accounting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakSet

from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.jobs import FailureLog
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.offload import Handover, Offloader, UnwrittenReason
from kvstrata.prefix_cache.radix_tree import Match, Node
from kvstrata.prefix_cache.tier_client import TierClient
from kvstrata.prefix_cache.transcode import Transcoder
from kvstrata.tiers.interface import Removed
from kvstrata.tiers.lookups import Lookup, answered


@dataclass(frozen=True)
class Cleared:
    """Bytes and tokens that were removed on request."""

    nbytes: int
    tokens: int


DropReason = Literal["too_large", "no_room", "least_worth"] | UnwrittenReason

KeptBecause = Literal["", "pinned", "running"]


@dataclass(frozen=True)
class DropResult:
    """Result of dropping a conversation."""

    tokens: int  # in memory
    nbytes: int
    kept_because: KeptBecause  # why nothing was dropped; empty: everything evictable was
    on_disk: Lookup[Removed]


class DropCounters:
    """Dropped-token accounting: counts evicted tokens that are nowhere else, by reason."""

    def __init__(self, table: EntryTable, counters: Counter[str]) -> None:
        self._table = table
        self._counters = counters
        self._new: WeakSet[Entry] = WeakSet()  # inserted since memory last fitted all entries

    def record_insertion(self, entry: Entry) -> None:
        self._new.add(entry)

    def record_eviction(self, entry: Entry, lost_tokens: int, reason: DropReason | None, *, num_tokens: int) -> None:
        """Count `num_tokens` tokens of an entry that are about to be evicted, `lost_tokens` of them not on the disk.
        `reason`: why they are not; None: there is no disk."""
        self._counters["evicted_tokens"] += num_tokens
        is_new = entry in self._new
        self._new.discard(entry)
        if not lost_tokens:
            return
        reason = reason or self._memory_reason(entry)
        self._counters[f"dropped_tokens_{reason}"] += lost_tokens
        if is_new:
            self._counters[f"refused_{reason}"] += 1

    def forget_new_entries(self) -> None:
        """Count no present entry as new any more: memory fits them all."""
        self._new.clear()

    def _memory_reason(self, entry: Entry) -> DropReason:
        if entry.nbytes > self._table.max_bytes:
            return "too_large"
        return "least_worth" if self._table.evictable_bytes > entry.nbytes else "no_room"


class Evictor:
    """Removes leaves of the entry table: under pressure, after their time to live, and on request."""

    def __init__(
        self,
        table: EntryTable,
        matcher: PrefixMatcher,
        disk: TierClient,
        offloader: Offloader,
        transcoder: Transcoder,
        failures: FailureLog,
    ) -> None:
        self._table = table
        self._candidates = table.candidates
        self._matcher = matcher
        self._disk = disk
        self._offloader = offloader
        self._transcoder = transcoder
        self._failures = failures
        self.drop_counters = DropCounters(table, failures.counters)

    def expire(self) -> None:
        """Evict the leaves that no request has used within their time to live."""
        self.evict_to(self._table.nbytes)

    def evict_to(
        self,
        limit_bytes: int,
        is_evictable: Callable[[Node[Entry]], bool] = lambda _: True,
        *,
        spare_only: bool = False,
        until_s: float = math.inf,
    ) -> None:
        """Evict expired leaves, then others until at most `limit_bytes` are held or only entries in use are left. No
        span steps down for it: `Reclaimer.shrink_to` decides what else is done.

        It stops at the first unexpired leaf that `is_evictable` refuses. With `spare_only` it evicts only leaves that
        the disk has, too, and superseded ones. `until_s`: see `evict_leaf`."""
        while True:
            chosen = self._candidates.choose(self._table.nbytes - limit_bytes, spare_only=spare_only)
            # While one leaf is written or removed, others may grow upward: an end is known by its position.
            ends = [(each.leaf, each.leaf.start + each.keep_tokens) for each in chosen]
            for leaf, end in ends:
                if not self._candidates.has_expired(leaf) and not is_evictable(leaf):
                    self._candidates.offer_node(leaf)
                    return
                self.evict_leaf(leaf, end, until_s)
            if not chosen:
                return

    def drop_superseded(self) -> None:
        """Evict the branches that conversations have left behind: the final write leaves them out."""
        for node in self._candidates.superseded():
            if node.is_leaf and node.payload.is_evictable:
                self.evict_leaf(node, node.start)

    def shrink_arrays(self, until_s: float = math.inf) -> None:
        """Evict the leaves of least worth while the entries hold more arrays than the machine allows. `until_s`: see
        `evict_leaf`."""
        while self._table.has_too_many_arrays and (chosen := self._candidates.choose(1)):
            for each in chosen:
                self.evict_leaf(each.leaf, each.leaf.start, until_s)

    def evict_leaf(self, leaf: Node[Entry], end: int, until_s: float = math.inf) -> None:
        """Evict a leaf's tokens from position `end` on. An unexpired leaf is written to the disk first: it may be
        encoded until `until_s`, and tokens that are not encoded by then are written as they are."""
        has_expired = self._candidates.has_expired(leaf)
        handover = Handover(leaf.start, "expired") if has_expired else self.write_first(leaf, until_s, writes_all=True)
        end = self._table.usable_end(leaf, end)
        is_trimmed = leaf.start < end < leaf.end
        first_evicted = end if is_trimmed else leaf.start
        lost_tokens = max(0, leaf.end - max(first_evicted, handover.end))
        self.drop_counters.record_eviction(
            leaf.payload, lost_tokens, handover.reason, num_tokens=leaf.end - first_evicted
        )
        if is_trimmed:
            self._table.trim_leaf(leaf, end)
            if self._transcoder.precision.gathers:
                # The rest of the leaf may fit into fewer arrays.
                self._transcoder.jobs.add(leaf.payload)
        else:
            self._table.remove_leaf(leaf)

    def write_first(self, leaf: Node[Entry], until_s: float = math.inf, *, writes_all: bool = False) -> Handover:
        """Encode a leaf that is about to be evicted and write it to the disk, as far as time allows. With `writes_all`
        all of it is written, and tokens that are not encoded by `until_s` are written as they are. A failure does not
        keep the leaf from being evicted."""
        failed = Handover(leaf.start, "disk_failed" if self._disk.has_tier else None)
        return self._failures.attempt("spills", lambda: self._write_first(leaf, until_s, writes_all=writes_all), failed)

    def _write_first(self, leaf: Node[Entry], until_s: float, *, writes_all: bool) -> Handover:
        if self._offloader.wants(leaf):
            # Spans may be joined: `leaf.payload` may be another entry afterwards.
            self._transcoder.finish_path(leaf, until_s)
        is_transcoding = self._transcoder.jobs.has(leaf.payload)
        return self._offloader.write_leaf(leaf, until_s, is_transcoding=is_transcoding, must_evict=writes_all)

    def clear(
        self, salt: str | None = None, tier: Literal["hot", "disk", "all"] = "all", *, owner: str | None = None
    ) -> Cleared:
        """Remove what is evictable in memory and everything on the disk, under one salt, an owner's salts, or all."""
        under = self._matcher.roots_begin(salt, owner)
        before_bytes, before_tokens = self._table.nbytes, self._table.tree.num_tokens
        if tier != "disk":
            self._clear_memory(under)
        hot = Cleared(before_bytes - self._table.nbytes, before_tokens - self._table.tree.num_tokens)
        if tier == "hot":
            return hot
        self._offloader.cancel_writes(under)
        for entry in self._table.entries:
            if entry.root_key.startswith(under):
                self._table.set_archived(entry, None)
        removed = self._disk.tier.clear(under)
        return Cleared(hot.nbytes + removed.disk_bytes, hot.tokens + removed.num_tokens)

    def _clear_memory(self, under: bytes) -> None:
        """Remove every evictable leaf, and the nodes that become leaves by it, under all roots that begin with
        `under`."""
        table = self._table
        nodes = [node for root in table.tree.root_keys if root.startswith(under) for node in table.tree.nodes(root)]
        # Children before their parents.
        for node in reversed(nodes):
            if node in node.payload.nodes and node.is_leaf and node.payload.is_evictable:
                table.remove_leaf(node)
        for root in table.ghosts.root_keys:
            if root.startswith(under):
                table.ghosts.drop(root)

    def drop_conversation(self, ids: TokenIds, salt: str, *, is_dry: bool) -> DropResult:
        """Remove the tokens that no other conversation has, in memory and on the disk. With `is_dry` nothing is
        removed, and the result says what would be."""
        root = self._matcher.root_of(salt)
        match = self._table.tree.match(root, ids)
        nodes = _own_nodes(match)
        last = match.path[-1] if match.path else None
        if last is not None and not nodes and last.is_leaf and last.end == match.num_tokens:
            return DropResult(0, 0, "pinned" if last.payload.is_pinned else "running", answered(Removed()))
        tokens, nbytes = sum(node.num_tokens for node in nodes), sum(_nbytes(node) for node in nodes)
        start = nodes[-1].start if nodes else match.num_tokens
        on_disk = self._disk.drop_chain(root, ids, start, is_dry=is_dry)
        if not is_dry:
            self._remove_nodes(nodes)
            self._forget_ghost(root, ids)
        return DropResult(tokens, nbytes, "", on_disk)

    def _remove_nodes(self, nodes: Sequence[Node[Entry]]) -> None:
        for node in nodes:
            self._table.remove_leaf(node)

    def _forget_ghost(self, root: bytes, ids: TokenIds) -> None:
        """Keep a later miss from being explained as an eviction: the conversation was dropped on request."""
        match = self._table.ghosts.match(root, ids)
        last = match.path[-1] if match.path else None
        if last is not None and last.is_leaf and last.end == match.num_tokens:
            self._table.ghosts.remove(last)


def _own_nodes(match: Match[Entry]) -> list[Node[Entry]]:
    """Return the evictable nodes at the end of a match that no other conversation has, the last one first."""
    nodes: list[Node[Entry]] = []
    for node in reversed(match.path):
        if node.end > match.num_tokens or len(node.children) > bool(nodes) or not node.payload.is_evictable:
            break
        nodes.append(node)
    return nodes


def _nbytes(node: Node[Entry]) -> int:
    entry = node.payload
    return entry.nbytes * node.num_tokens // max(1, entry.span.num_tokens)
