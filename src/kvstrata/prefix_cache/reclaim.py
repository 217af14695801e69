"""Reclaim memory: step down, offload, evict, in this order."""

from __future__ import annotations

import math
import time
from typing import Literal

from kvstrata.prefix_cache.entries import CachedPrefix, Entry
from kvstrata.prefix_cache.entry_table import Checkpoints, EntryTable
from kvstrata.prefix_cache.eviction import Evictor
from kvstrata.prefix_cache.jobs import JobQueue
from kvstrata.prefix_cache.keys import Tokens
from kvstrata.prefix_cache.ladder import HIGH
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.offload import DropCounters, Offloader
from kvstrata.prefix_cache.precision import StepDownPolicy
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.transcode import Transcoder

# done         no more than the limit is held, or only what is in use, or what nothing can be done about
# steps_down   spans are about to step down: the chores do it
# awaits_disk  what is to go is on its way to the disk, which is working
Shrunk = Literal["done", "steps_down", "awaits_disk"]

# Of the memory for stored spans, while they step down or go to the disk between steps: a conversation that ends is
# stored at once, and no request should wait until there is room for it.
MOST_OVER = 1.5


class Reclaimer:
    def __init__(
        self,
        shelf: EntryTable,
        evictor: Evictor,
        rewriting: Transcoder,
        pressure: StepDownPolicy,
        spills: Offloader,
        losses: DropCounters,
    ) -> None:
        self._shelf = shelf
        self._evictor = evictor
        self._rewriting = rewriting
        self._pressure = pressure
        self._spills = spills
        self._losses = losses
        self.limit_bytes = shelf.max_bytes  # of all that is stored, beside what runs at present
        self._waits_for_disk = False  # the leaf that was looked at last is on its way to the disk

    @property
    def left_bytes(self) -> int:
        """How much more may be held before anything has to go."""
        return self.limit_bytes - self._shelf.nbytes

    def step_down_early(self, used_bytes: int, limit_bytes: int) -> None:
        """Ahead of need: let spans step down when so much is in use, stored and running, of what there is."""
        self.limit_bytes = min(self._shelf.max_bytes, limit_bytes - (used_bytes - self._shelf.nbytes))
        is_high = used_bytes > HIGH * limit_bytes
        pending_bytes = self._rewriting.pending_bytes() if is_high else 0
        self._rewriting.step_down(self._pressure.choose_early(used_bytes - pending_bytes, limit_bytes))

    def step_down(self, need_bytes: int) -> None:
        """Let spans step down until so much would be free, as far as the floors allow. The chores do it."""
        self._rewriting.step_down(self._pressure.choose(need_bytes))

    def fits(self, limit_bytes: int) -> bool:
        """Whether no more than this is held already."""
        return self._shelf.nbytes <= min(limit_bytes, self._shelf.max_bytes)

    def nearly_fits(self, limit_bytes: int) -> bool:
        """Whether no more is held than may be for a moment. `limit_bytes` is memory that there is: no more than that
        ever is."""
        return self._shelf.nbytes <= self._most_for_now(limit_bytes)

    def _most_for_now(self, limit_bytes: int) -> float:
        return min(limit_bytes, MOST_OVER * self._shelf.max_bytes)

    def shrink_to(self, limit_bytes: int, slice_s: float = math.inf, *, most_bytes: int | None = None) -> Shrunk:
        """Let spans step down and evict until no more than this is held, or only what is in use. First goes what
        conversations have left behind, then what the disk has too, as far as it is worth least; then spans step down;
        then leaves go as the disk takes them.

        What a working disk is about to take stays until then, but no more than `most_bytes` are held in any case.
        `slice_s`: about how long it may work here. It stops as soon as what is held nearly fits; the chores do the
        rest. No more arrays are held afterwards than the machine allows, either: no job that changes spans lets go of
        any."""
        enough_bytes = self._most_for_now(limit_bytes)
        limit_bytes = min(limit_bytes, self._shelf.max_bytes)
        until_s = time.monotonic() + slice_s
        self._spills.offer_under_pressure(limit_bytes, self._shelf.max_bytes)
        self._evictor.shrink_to(
            limit_bytes, lambda leaf: self._spills.is_on_disk(leaf.payload) or self._spills.is_superseded(leaf)
        )
        if self._shelf.nbytes > limit_bytes:
            self.step_down(self._shelf.nbytes - limit_bytes - self._rewriting.pending_bytes())
        # What waits to be trimmed or encoded gives more room than it takes.
        mover = self._rewriting.jobs
        while self._shelf.nbytes > enough_bytes and not mover.idle and time.monotonic() < until_s:
            mover.run(0)
        shrunk = self._shrink_as_disk_takes(limit_bytes, enough_bytes, until_s)
        if most_bytes is not None:
            # Rather what can be read again than what would be lost.
            self._evictor.shrink_to(most_bytes, spare_only=True)
            self._evictor.shrink_to(most_bytes, until_s=until_s)
        self._evictor.keep_arrays_few(until_s)
        if shrunk == "done":
            self._losses.forget_new_entries()
        return shrunk

    def _shrink_as_disk_takes(self, limit_bytes: int, enough_bytes: float, until_s: float) -> Shrunk:
        if self._shelf.nbytes > limit_bytes and self._rewriting.pending_bytes() > 0:
            return "steps_down"
        self._waits_for_disk = False
        self._evictor.shrink_to(limit_bytes, lambda leaf: self._may_go(leaf, enough_bytes, until_s), until_s=until_s)
        return "awaits_disk" if self._waits_for_disk else "done"

    def _may_go(self, leaf: Node[Entry], enough_bytes: float, until_s: float) -> bool:
        """Unless the disk is about to take it."""
        is_urgent = self._shelf.nbytes > enough_bytes
        self._waits_for_disk = self._evictor.write_first(leaf, until_s if is_urgent else 0.0).waits
        return not self._waits_for_disk


class Shortening:
    def __init__(
        self, shelf: EntryTable, search: PrefixMatcher, marks: Checkpoints, evictor: Evictor, mover: JobQueue
    ) -> None:
        self._shelf = shelf
        self._search = search
        self._marks = marks
        self._evictor = evictor
        self._mover = mover

    def evict_own_prefix(self, tokens: Tokens, salt: str, need_bytes: int, *, keeps_used: bool) -> bool:
        """Let go of some of what a match of these would keep in memory, so many bytes if that can be: what it does not
        use first. False: there is nothing that may go."""
        held_bytes = self._shelf.nbytes
        for entry in self._search.find(tokens, salt).entries:
            self._mover.run_entry(entry)
        found = self._search.find(tokens, salt)
        return self._shelf.nbytes < held_bytes or self._shorten(found, need_bytes, keeps_used=keeps_used)

    def _shorten(self, found: CachedPrefix, need_bytes: int, *, keeps_used: bool) -> bool:
        """Ends that the match does not use, then marks, then what it uses itself, the end first: that has a mark."""
        used = max(found.num_tokens, found.checkpoint_at or 0)
        for entry in found.entries:
            used_end = max(min(node.end, used) for node in found.path if node.payload is entry)
            last = entry.last_node
            if last.end > used_end and self._cut(last, used_end, need_bytes):
                return True
        if self._marks.drop_checkpoints((entry for entry in found.entries if entry.is_evictable), found.checkpoint_at):
            return True
        return not keeps_used and bool(found.path) and self._cut(found.path[-1], 0, need_bytes)

    def _cut(self, node: Node[Entry], start: int, need_bytes: int) -> bool:
        """A node from its end on, but for what is before `start`; all that hangs on it goes first, a leaf at a time."""
        leaf = node
        while not leaf.is_leaf:
            leaf = next(iter(leaf.children.values()))
        entry = leaf.payload
        if not entry.is_evictable:
            return False
        need_tokens = (
            -(-need_bytes * entry.span.num_tokens // max(1, entry.nbytes)) if leaf is node else leaf.num_tokens
        )
        self._evictor.evict_leaf(leaf, max(start, leaf.end - need_tokens))
        return True
