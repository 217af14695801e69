"""Reclaim memory: evict what costs least, step spans down, then evict the rest as the disk takes it."""

from __future__ import annotations

import math
import time
from typing import Literal

from kvstrata.prefix_cache.entries import CachedPrefix, Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.eviction import Evictor
from kvstrata.prefix_cache.keys import Tokens
from kvstrata.prefix_cache.ladder import HIGH
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.offload import Offloader
from kvstrata.prefix_cache.precision import StepDownPolicy
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.transcode import Transcoder

# done         at most the limit is held, or the rest is in use or cannot be freed
# steps_down   spans are about to step down in background work
# awaits_disk  the next leaf to evict is on its way to a working disk
Shrunk = Literal["done", "steps_down", "awaits_disk"]

# Most bytes, as a share of the memory for cached spans, while spans step down or are offloaded between steps: a
# conversation that ends is cached at once, and no request should wait until memory has been reclaimed for it.
MOST_OVER = 1.5


class Reclaimer:
    """Keeps the cached bytes within their limit.

    Three bounds apply. `limit_bytes` is the goal, which background work reaches. The tolerated bytes are at most
    `MOST_OVER` times the memory for cached spans: work that holds up a step ends there. `hard_limit_bytes` holds when
    a call returns, whatever is lost by it.
    """

    def __init__(
        self,
        table: EntryTable,
        matcher: PrefixMatcher,
        evictor: Evictor,
        transcoder: Transcoder,
        step_down_policy: StepDownPolicy,
        offloader: Offloader,
    ) -> None:
        self._table = table
        self._matcher = matcher
        self._evictor = evictor
        self._transcoder = transcoder
        self._step_down_policy = step_down_policy
        self._offloader = offloader
        self.limit_bytes = table.max_bytes  # for cached spans, beside the sequences that run at present
        self._memory_bytes = table.max_bytes  # memory that these sequences leave; may be more than the limit
        self._awaits_disk = False  # whether the leaf that was tried last is on its way to the disk

    @property
    def free_bytes(self) -> int:
        """Bytes that can be cached without an eviction."""
        return self.limit_bytes - self._table.nbytes

    @property
    def free_or_evictable_bytes(self) -> int:
        """Bytes that can be cached if all evictable entries go."""
        return self.limit_bytes - (self._table.nbytes - self._table.evictable_bytes)

    def step_down_early(self, used_bytes: int, limit_bytes: int) -> None:
        """Start stepping down ahead of need. `used_bytes` are the bytes of cached spans and running sequences, and
        `limit_bytes` is the limit for both."""
        self._memory_bytes = limit_bytes - (used_bytes - self._table.nbytes)
        self.limit_bytes = min(self._table.max_bytes, self._memory_bytes)
        is_high = used_bytes > HIGH * limit_bytes
        pending_bytes = self._transcoder.pending_bytes() if is_high else 0
        self._transcoder.apply_step_downs(self._step_down_policy.choose_early(used_bytes - pending_bytes, limit_bytes))

    def step_down(self, need_bytes: int) -> None:
        """Start stepping down until `need_bytes` would be free, as far as the floors allow. Background work does it."""
        self._transcoder.apply_step_downs(self._step_down_policy.choose(need_bytes))

    def fits(self, limit_bytes: int) -> bool:
        """Whether at most this many bytes are cached already."""
        return self._table.nbytes <= min(limit_bytes, self._table.max_bytes)

    def fits_for_now(self, limit_bytes: int) -> bool:
        """Whether the cached bytes are tolerated for now, where `limit_bytes` is the memory that there is."""
        return self._table.nbytes <= self._tolerated_bytes_for(limit_bytes)

    def _tolerated_bytes_for(self, limit_bytes: int) -> float:
        return min(limit_bytes, MOST_OVER * self._table.max_bytes)

    def reclaim_for_load(self, nbytes: int) -> bool:
        """Reclaim memory for blocks that a tier has read. Return whether they fit. While spans step down or a working
        disk is about to take them, the limit may be exceeded for a moment, as it may be by a request."""
        hard_limit_bytes = int(self._tolerated_bytes_for(self._memory_bytes)) - nbytes
        shrunk = self.shrink_to(self.limit_bytes - nbytes, 0.0, hard_limit_bytes=hard_limit_bytes)
        return self._table.nbytes <= (self.limit_bytes - nbytes if shrunk == "done" else hard_limit_bytes)

    def shrink_to(self, limit_bytes: int, slice_s: float = math.inf, *, hard_limit_bytes: int | None = None) -> Shrunk:
        """Step down, offload and evict until at most `limit_bytes` are cached, or only entries in use are left.

        The order is: superseded leaves and leaves that the disk has, while they are worth least; step-downs; then other
        leaves, as the disk takes them. A leaf that a working disk is about to take stays until then, but at most
        `hard_limit_bytes` are held in any case. The call works for about `slice_s` and stops at the tolerated bytes;
        background work does the rest. Afterwards the entries hold at most as many arrays as the machine allows: jobs
        that change spans evict nothing."""
        tolerated_bytes = self._tolerated_bytes_for(limit_bytes)
        limit_bytes = min(limit_bytes, self._table.max_bytes)
        until_s = time.monotonic() + slice_s
        self._offloader.offer_under_pressure(limit_bytes, self._table.max_bytes)
        self._evictor.evict_to(
            limit_bytes,
            lambda leaf: self._offloader.check_archived(leaf.payload) or self._offloader.is_superseded(leaf),
        )
        if self._table.nbytes > limit_bytes:
            self.step_down(self._table.nbytes - limit_bytes - self._transcoder.pending_bytes())
        # A waiting job, to trim or to encode a span, frees more than it takes.
        jobs = self._transcoder.jobs
        while self._table.nbytes > tolerated_bytes and not jobs.is_idle and time.monotonic() < until_s:
            jobs.run(0)
        shrunk = self._shrink_as_disk_takes(limit_bytes, tolerated_bytes, until_s)
        if hard_limit_bytes is not None:
            # Leaves that can be read again go before leaves that would be lost.
            self._evictor.evict_to(hard_limit_bytes, spare_only=True)
            self._evictor.evict_to(hard_limit_bytes, until_s=until_s)
        self._evictor.shrink_arrays(until_s)
        if shrunk == "done":
            self._evictor.drop_counters.forget_new_entries()
        return shrunk

    def _shrink_as_disk_takes(self, limit_bytes: int, tolerated_bytes: float, until_s: float) -> Shrunk:
        if self._table.nbytes > limit_bytes and self._transcoder.pending_bytes() > 0:
            return "steps_down"
        self._awaits_disk = False
        self._evictor.evict_to(
            limit_bytes, lambda leaf: self._write_and_check(leaf, tolerated_bytes, until_s), until_s=until_s
        )
        return "awaits_disk" if self._awaits_disk else "done"

    def _write_and_check(self, leaf: Node[Entry], tolerated_bytes: float, until_s: float) -> bool:
        """Write a leaf, and return whether it can be evicted now: not while the disk is about to take it."""
        is_urgent = self._table.nbytes > tolerated_bytes
        self._awaits_disk = self._evictor.write_first(leaf, until_s if is_urgent else 0.0).waits
        return not self._awaits_disk

    def evict_own_prefix(self, tokens: Tokens, salt: str, need_bytes: int, *, keeps_used: bool) -> bool:
        """Free about `need_bytes` from the cached prefix of a request that does not fit an idle engine: first what the
        request does not use and, unless `keeps_used`, then what it does. Return whether anything was freed."""
        before_bytes = self._table.nbytes
        for entry in self._matcher.find(tokens, salt).entries:
            self._transcoder.jobs.run_entry(entry)
        prefix = self._matcher.find(tokens, salt)
        return self._table.nbytes < before_bytes or self._shorten_prefix(prefix, need_bytes, keeps_used=keeps_used)

    def _shorten_prefix(self, prefix: CachedPrefix, need_bytes: int, *, keeps_used: bool) -> bool:
        """Free one thing of a prefix: an end that the request does not use, else the checkpoints, else the end of what
        it uses, which has a checkpoint."""
        used_tokens = max(prefix.num_tokens, prefix.checkpoint_at or 0)
        for entry in prefix.entries:
            used_end = max(min(node.end, used_tokens) for node in prefix.path if node.payload is entry)
            last = entry.last_node
            if last.end > used_end and self._evict_end(last, used_end, need_bytes):
                return True
        evictable = (entry for entry in prefix.entries if entry.is_evictable)
        if self._table.drop_checkpoints(evictable, prefix.checkpoint_at):
            return True
        return not keeps_used and bool(prefix.path) and self._evict_end(prefix.path[-1], 0, need_bytes)

    def _evict_end(self, node: Node[Entry], start: int, need_bytes: int) -> bool:
        """Evict the end of a node, but nothing before `start`. A node with children loses a leaf below it instead.
        Return whether the leaf was evictable."""
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
