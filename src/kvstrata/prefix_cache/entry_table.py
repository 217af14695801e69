"""Entry table: the radix tree over cached spans, their bytes, and the leaves that may be evicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from kvstrata.kv.checkpoints import Checkpoint
from kvstrata.kv.gather import num_arrays
from kvstrata.kv.span import empty_span
from kvstrata.kv.transcode import shrink
from kvstrata.prefix_cache.config import CacheLimits
from kvstrata.prefix_cache.entries import ArchivedCopy, DirtySets, Entry, PrecisionTarget
from kvstrata.prefix_cache.eviction_order import Chosen, EvictionOrder, LeafValue, UseRecords
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.radix_tree import Inserted, Node, RadixTree
from kvstrata.prefix_cache.worth import PrefillCost, Reuse, ReuseClass

# A trimmed leaf keeps a multiple of this number of tokens.
QUANTUM_TOKENS = 256

# Evicted tokens that the table remembers, so that a miss can be explained.
GHOST_TOKENS = 1 << 20


class EvictionCandidates:
    """Leaves that may be evicted, by what they are worth, and the last use of every node."""

    def __init__(self, reuse: Reuse, ttl_s: float | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ttl_s = math.inf if ttl_s is None else ttl_s
        self._uses = UseRecords()
        self._order: EvictionOrder[Node[Entry]] = EvictionOrder(reuse, PrefillCost(), QUANTUM_TOKENS)
        self._superseded: set[Node[Entry]] = set()  # leaves, and nodes above them

    def record_use(self, nodes: Sequence[Node[Entry]], reuse_class: ReuseClass, session: str = "") -> None:
        """Record that a request resumes from nodes."""
        self._uses.record_use(nodes, reuse_class, self._clock(), session)
        self._superseded.difference_update(nodes)
        for node in nodes:
            self.offer_node(node)

    def record_insert(self, inserted: Inserted[Entry], reuse_class: ReuseClass, session: str = "") -> None:
        """Record that a request has inserted its tokens."""
        self._uses.record_insert(inserted, reuse_class, self._clock(), session)
        self._superseded.difference_update(inserted.path)

    def record_split(self, upper: Node[Entry], lower: Node[Entry]) -> None:
        """Record that a node was split without a use of either half."""
        self._uses.record_split(upper, lower)
        if lower in self._superseded:
            self._superseded.add(upper)
        self.offer_node(lower)

    def record_merge(self, upper: Node[Entry], lower: Node[Entry]) -> None:
        """Record that the lower node has the tokens of both now."""
        if upper not in self._superseded:
            self._superseded.discard(lower)
        self._uses.record_merge(upper, lower)
        self.forget_node(upper)

    def supersede(self, node: Node[Entry], session: str) -> None:
        """Let a node be evicted first, because its session has diverged before it, unless others have used it."""
        if self._uses[node].session == session:
            self._superseded.add(node)
            self.offer_node(node)

    def is_superseded(self, node: Node[Entry]) -> bool:
        """Whether a node's session has diverged before it."""
        return node in self._superseded

    def superseded(self) -> list[Node[Entry]]:
        """Return all superseded nodes, children before their parents."""
        return sorted(self._superseded, key=lambda node: node.start, reverse=True)

    def offer_node(self, node: Node[Entry]) -> None:
        """Make a node that has changed a candidate, or no longer: only an evictable leaf is a candidate."""
        entry = node.payload
        if not node.is_leaf or not entry.is_evictable:
            self._order.discard(node)
            return
        nbytes = entry.nbytes * node.num_tokens // max(1, entry.span.num_tokens)
        use = self._uses[node]
        expires_s = use.used_s + self._ttl_s
        value = LeafValue(
            nbytes, node.start, node.num_tokens, use.used_s, use.reuse_class, expires_s, entry.is_archived
        )
        self._order.add(node, value._replace(is_superseded=True) if node in self._superseded else value)

    def offer_last_node(self, entry: Entry) -> None:
        """Offer the last node of an entry: its nodes are on one path, so no other can be a leaf."""
        if entry.nodes:
            self.offer_node(entry.last_node)

    def withdraw_node(self, node: Node[Entry]) -> None:
        """Withdraw a node that is no leaf any more."""
        self._order.discard(node)

    def forget_node(self, node: Node[Entry]) -> None:
        """Forget a node that has left the tree."""
        self._superseded.discard(node)
        self._order.discard(node)
        self._uses.forget_node(node)

    def choose(self, need_bytes: int, *, spare_only: bool = False) -> list[Chosen[Node[Entry]]]:
        """Choose leaves to evict: see `EvictionOrder.choose`."""
        return self._order.choose(need_bytes, self._clock(), spare_only=spare_only)

    def has_expired(self, node: Node[Entry]) -> bool:
        """Whether no request has used a node within the TTL."""
        return self._clock() >= self._uses[node].used_s + self._ttl_s

    def seconds_to_expiry(self) -> float:
        """Return the seconds until the next candidate expires; infinite if none will."""
        return max(0.0, self._order.next_expiry_s() - self._clock())

    def last_use_s(self, entry: Entry) -> float:
        """Return when a request last resumed from any node of an entry."""
        return max((self._uses[node].used_s for node in entry.nodes), default=0.0)

    def unused_s(self, entry: Entry) -> float:
        """Return the seconds since a request last resumed from an entry."""
        return self._clock() - self.last_use_s(entry)

    def last_use_of_end_s(self, entry: Entry) -> float:
        """Return when a request last resumed from an entry's last node: from all of it, not only from a shared
        beginning."""
        return self._uses[entry.last_node].used_s

    def last_use_of_node_s(self, node: Node[Entry]) -> float:
        """Return when a request last resumed from a node."""
        return self._uses[node].used_s

    def now_s(self) -> float:
        """Return the time on the clock of the last uses."""
        return self._clock()


# An entry, or a load, which holds blocks until they are an entry's.
Holder = Hashable


class BlockResidency:
    """Blocks on the disk that have the tokens of each entry, so that their removal can be noticed.

    Used by the thread that owns MLX alone. Keeps no load alive that its request has lost in a fault.
    """

    def __init__(self) -> None:
        self._keys: WeakKeyDictionary[Holder, set[bytes]] = WeakKeyDictionary()
        self._holders: dict[bytes, WeakSet[Holder]] = {}
        self._incomplete: WeakSet[Holder] = WeakSet()  # have lost a block since their blocks were recorded
        self._doubted: dict[Entry, None] = {}  # incomplete ones that the owner has not taken yet

    def begin_recording(self, entry: Entry) -> None:
        """Begin to record the blocks of an entry anew: blocks that it lost before are written again."""
        self._incomplete.discard(entry)
        self._doubted.pop(entry, None)

    def record_block(self, holder: Holder, key: bytes) -> None:
        """Record a block of a holder. To miss no removal, the caller does so before it looks the block up."""
        self._keys.setdefault(holder, set()).add(key)
        self._holders.setdefault(key, WeakSet()).add(holder)

    def has_block(self, load: Holder, key: bytes) -> bool:
        """Whether a block of a load has stayed on the disk since the load began."""
        return key in self._keys.get(load, ())

    def is_complete(self, entry: Entry) -> bool:
        """Whether no block of an entry has left the disk since its blocks were recorded."""
        return entry not in self._incomplete

    def remove_block(self, key: bytes) -> list[Entry]:
        """Forget a block that has left the disk. Returns the entries that had tokens in it."""
        holders = list(self._holders.pop(key, ()))
        for holder in holders:
            self._keys[holder].discard(key)
        self._incomplete.update(holders)
        return [holder for holder in holders if isinstance(holder, Entry)]

    def doubt_all(self) -> None:
        """Take all holders for incomplete: any block may have left the disk."""
        self.forget_loads()
        self._incomplete.update(self._keys)
        self._doubted.update(dict.fromkeys(holder for holder in self._keys if isinstance(holder, Entry)))

    @property
    def has_doubted(self) -> bool:
        """Whether `take_doubted` would return entries."""
        return bool(self._doubted)

    def take_doubted(self, max_entries: int) -> list[Entry]:
        """Take some of the entries of which any block may have left the disk."""
        return [self._doubted.popitem()[0] for _ in range(min(max_entries, len(self._doubted)))]

    def join(self, first: Entry, second: Entry) -> None:
        """Give the blocks of the second entry to the first, which has the tokens of both now."""
        if second in self._incomplete:
            self._incomplete.add(first)
        for key in self._keys.get(second, ()):
            self.record_block(first, key)
        self.forget(second)

    def forget_loads(self) -> None:
        """Forget all loads: their blocks have left the disk."""
        for load in [holder for holder in self._keys if not isinstance(holder, Entry)]:
            self.forget(load)

    def forget(self, holder: Holder) -> None:
        """Forget a holder that has left memory, or needs its blocks no longer."""
        self._incomplete.discard(holder)
        if isinstance(holder, Entry):
            self._doubted.pop(holder, None)
        for key in self._keys.pop(holder, ()):
            holders = self._holders[key]
            holders.discard(holder)
            if not holders:
                del self._holders[key]


class CacheListener(Protocol):
    """Listener that the entry table calls on the engine's thread. `ids` may change after a call."""

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        """All of `ids` is cached now; the tokens from `start` on are new."""
        ...

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        """All of `ids` was cached; the tokens from `start` on are not any more."""
        ...

    def cleared(self) -> None:
        """No token is cached any more."""
        ...


class NoListener:
    """Listener that ignores all calls."""

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None: ...

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None: ...

    def cleared(self) -> None: ...


class EntryTable:
    """Entry table: the radix tree over cached spans, and the totals and queues that follow from it.

    Sole writer of `Entry`: the setters keep byte totals, eviction candidates and dirty sets in step with it.
    """

    def __init__(
        self,
        candidates: EvictionCandidates,
        limits: CacheLimits,
        *,
        max_checkpoints: int,
        needs_checkpoints: bool,
        listener: CacheListener | None = None,
    ) -> None:
        """`max_checkpoints`: limit on the path from the first token to a leaf. `needs_checkpoints`: the model can be
        resumed at checkpoints only."""
        self.candidates = candidates
        self._listener = listener or NoListener()
        self.max_bytes = limits.max_bytes
        self._max_arrays = limits.max_arrays
        self._max_checkpoints = max_checkpoints
        self.needs_checkpoints = needs_checkpoints
        self.tree: RadixTree[Entry] = RadixTree()
        self.ghosts: RadixTree[None] = RadixTree()  # evicted tokens
        self.entries: dict[Entry, None] = {}
        self.dirty_sets = DirtySets(self.entries)
        self.residency = BlockResidency()
        self.version = 0  # changes whenever a lookup may have another result
        self.num_changes = 0  # grows with the first change that an operation makes
        self.is_broken = False  # an operation failed half-way: no operation may use the table any more
        self.nbytes = 0  # of all spans and checkpoints, without the KV buffers of running sequences
        self.evictable_bytes = 0  # of evictable entries
        self.num_arrays = 0  # of all spans, if there is a limit

    @property
    def has_too_many_arrays(self) -> bool:
        """Whether the spans consist of more arrays than the machine allows."""
        return self._max_arrays is not None and self.num_arrays > self._max_arrays

    # Entry attributes.

    @contextmanager
    def _changing(self, entry: Entry) -> Iterator[None]:
        """Bring byte totals, candidates and dirty sets in step with a change of what protects an entry."""
        self.num_changes += 1
        was_evictable = entry.is_evictable
        yield
        if was_evictable != entry.is_evictable:
            self.evictable_bytes += entry.nbytes if entry.is_evictable else -entry.nbytes
        self.recount(entry)
        if was_evictable != entry.is_evictable:
            self.candidates.offer_last_node(entry)

    def add_lease(self, entry: Entry) -> None:
        """Count one more lease that protects an entry."""
        with self._changing(entry):
            entry.num_leases += 1

    def remove_lease(self, entry: Entry) -> None:
        """Count one lease less that protects an entry."""
        with self._changing(entry):
            entry.num_leases -= 1

    def set_pinned(self, entry: Entry, pins: frozenset[Hashable]) -> None:
        """Set the pins that protect an entry."""
        with self._changing(entry):
            entry.pins = pins

    def set_ended(self, entry: Entry) -> None:
        """Record that the sequence that owns an entry computes no more tokens."""
        with self._changing(entry):
            entry.is_running = False

    def set_archived(self, entry: Entry, copy: ArchivedCopy | None) -> None:
        """Set the copy of an entry on the disk: with it, memory loses less when the entry is evicted. None: a block is
        missing there."""
        was_archived, entry.archived = entry.is_archived, copy
        if was_archived != entry.is_archived:
            # No size changes: counting the arrays of hundreds of entries again would hold up a step.
            self.num_changes += 1
            self.dirty_sets.mark_dirty(entry)
            self.candidates.offer_last_node(entry)

    # Of the following attributes no total and no candidate depends: setting them leaves the table whole.

    def set_target(self, entry: Entry, target: PrecisionTarget | None) -> None:
        """Set an entry's own target precision; None: it has the target of all new spans."""
        entry.target = target
        self.dirty_sets.mark_dirty(entry)

    def set_shared_end(self, entry: Entry, end: int) -> None:
        """Record that an entry's tokens up to a position were given to the shared tier."""
        entry.shared_end = max(entry.shared_end, end)

    def set_stuck(self, entry: Entry) -> None:
        """Record that transcoding an entry has failed."""
        entry.is_stuck = True

    def recount(self, entry: Entry) -> None:
        """Count the bytes and arrays of an entry anew after its span has changed."""
        self.num_changes += 1
        self.dirty_sets.mark_dirty(entry)
        is_present = entry in self.entries
        if self._max_arrays is not None:
            before, entry.num_arrays = entry.num_arrays, num_arrays(entry.span) if is_present else 0
            self.num_arrays += entry.num_arrays - before
        # The KV buffers of a running sequence are counted with the sequence.
        nbytes = (entry.span.owned_bytes if entry.is_running else entry.span.nbytes) if is_present else 0
        if nbytes == entry.nbytes:
            return
        self.nbytes += nbytes - entry.nbytes
        if entry.is_evictable:
            self.evictable_bytes += nbytes - entry.nbytes
        entry.nbytes = nbytes
        self.candidates.offer_last_node(entry)

    # Entries and nodes.

    def add_entry(self, entry: Entry) -> None:
        """Add an entry, which has no nodes yet."""
        self.num_changes += 1
        self.entries[entry] = None
        self.recount(entry)

    def record_use(self, path: Iterable[Node[Entry]], reuse_class: ReuseClass, session: str = "") -> None:
        """Record that a request resumes from the nodes of a path."""
        self.num_changes += 1
        nodes = list(path)
        self.candidates.record_use(nodes, reuse_class, session)
        self.dirty_sets.mark_all_dirty(node.payload for node in nodes)

    def insert_entry(self, entry: Entry, ids: TokenIds) -> tuple[Node[Entry], ...]:
        """Insert all tokens of an entry's sequence so far: under the entry, as far as no other entry has them. Returns
        their path."""
        self.num_changes += 1
        self.version += 1
        inserted = self.tree.insert(entry.root_key, ids, entry)
        for node in inserted.path:
            node.payload.longest_end = max(node.payload.longest_end, len(ids))
        self.dirty_sets.mark_all_dirty(node.payload for node in inserted.path)
        self.candidates.record_insert(inserted, entry.reuse_class, entry.session)
        if inserted.outcome == "split":
            upper, lower = inserted.halves
            lower.payload.nodes.add(upper)
            self.candidates.offer_node(lower)
        if inserted.outcome in ("added", "split"):
            entry.nodes.add(inserted.path[-1])
            if len(inserted.path) > 1:
                self.candidates.withdraw_node(inserted.path[-2])
        if inserted.num_matched < len(ids):
            self._listener.stored(entry.root_key, ids, inserted.num_matched)
        return inserted.path

    def split_node(self, node: Node[Entry], position: int) -> None:
        """Split a node in two, so that the tokens after a position can be evicted by themselves."""
        self.num_changes += 1
        self.version += 1
        upper = self.tree.split(node, position)
        node.payload.nodes.add(upper)
        self.dirty_sets.mark_dirty(node.payload)
        self.candidates.record_split(upper, node)

    def drop_entry(self, entry: Entry) -> None:
        """Drop an entry without nodes. Its memory is freed now, even if other code still refers to the entry."""
        self.num_changes += 1
        del self.entries[entry]
        self.dirty_sets.remove(entry)
        self.residency.forget(entry)
        entry.span = empty_span(entry.span.layout)
        self.recount(entry)

    def abandon(self) -> None:
        """Drop all entries, even those that sequences use, whatever state the table is in."""
        self.tree = RadixTree()
        self._listener.cleared()
        for entry in list(self.entries):
            entry.nodes.clear()
            self.drop_entry(entry)

    def remove_leaf(self, node: Node[Entry]) -> None:
        """Remove a leaf and its tokens. Memory that no node needs any more is freed."""
        entry, parent = node.payload, node.parent
        self.num_changes += 1
        self.version += 1
        self._remember_evicted(node, node.start)
        self.tree.remove(node)
        self.candidates.forget_node(node)
        entry.nodes.discard(node)
        if parent is not None:
            self._merge_or_offer(parent)
        self._fit_span(entry)

    def trim_leaf(self, node: Node[Entry], end: int) -> None:
        """Remove the last tokens of a leaf."""
        self.num_changes += 1
        self.version += 1
        self._remember_evicted(node, end)
        self.tree.trim(node, end)
        self._fit_span(node.payload)
        self.candidates.offer_node(node)

    def join_spans(self, leaf: Node[Entry], max_spans: int) -> list[Entry]:
        """Join the shortest neighbours on the path of a leaf until it has at most `max_spans` spans, or no two that
        may be joined. Returns the entries that have grown."""
        grown: dict[Entry, None] = {}
        while True:
            entries = list(dict.fromkeys(node.payload for node in leaf.path()))
            pairs = [(a, b) for a, b in pairwise(entries) if _is_joinable(a, b)]
            if len(entries) <= max_spans or not pairs:
                return [entry for entry in grown if entry in self.entries]
            first, second = min(pairs, key=lambda pair: pair[0].span.num_tokens + pair[1].span.num_tokens)
            self._join(first, second)
            grown[first] = None

    def _join(self, first: Entry, second: Entry) -> None:
        self.num_changes += 1
        self.version += 1
        last = next(node for node in first.nodes if node.end == first.span.end)
        first.span.append(second.span)
        first.longest_end = max(first.longest_end, second.longest_end)
        copies = [each.archived.token_bytes for each in (first, second) if each.archived is not None]
        first.archived = ArchivedCopy(min(copies)) if len(copies) == 2 else None
        self.residency.join(first, second)
        for node in second.nodes:
            node.payload = first
            first.nodes.add(node)
        second.nodes.clear()
        self.drop_entry(second)
        self._merge_or_offer(last)
        self.recount(first)

    def _fit_span(self, entry: Entry) -> None:
        """Cut a span to the tokens of its nodes."""
        if not entry.nodes:
            self.drop_entry(entry)
            return
        span = entry.span
        start, end = min(node.start for node in entry.nodes), max(node.end for node in entry.nodes)
        if (start, end) != (span.position, span.end):
            span.cut(start, end)
            for layer in span.layers:
                shrink(span, layer)
        self.recount(entry)

    def _merge_or_offer(self, parent: Node[Entry]) -> None:
        """Merge a node that has lost a child with its only other child, or offer it: it may be a leaf now."""
        merged = self.tree.merge(parent)
        if merged is not parent:
            parent.payload.nodes.discard(parent)
            self.candidates.record_merge(parent, merged)
        self.dirty_sets.mark_dirty(merged.payload)
        self.candidates.offer_node(merged)

    def _remember_evicted(self, leaf: Node[Entry], start: int) -> None:
        """Remember the tokens of a leaf from a position on, which are about to be evicted."""
        if self.ghosts.num_tokens > GHOST_TOKENS:
            self.ghosts = RadixTree()
        tokens = np.concatenate([above.tokens for above in leaf.path()])
        self.ghosts.insert(leaf.root_key, tokens, None)
        self._listener.removed(leaf.root_key, tokens, start)

    # Checkpoints.

    def add_checkpoint(
        self, path: tuple[Node[Entry], ...], checkpoint: Checkpoint, resume_at: Iterable[int] = ()
    ) -> None:
        """Add a checkpoint to the entry that holds the token before it.

        `resume_at`: positions where later requests are likely to diverge. The last checkpoint before each of these
        stays while newer ones come.
        """
        position = checkpoint.position
        holder = next(node.payload for node in path if node.start < position <= node.end)
        if position in holder.span.checkpoints:
            return
        self.version += 1
        holder.span.checkpoints[position] = checkpoint
        self.recount(holder)
        self._drop_oldest_checkpoints(path, resume_at)

    def drop_checkpoints(self, entries: Iterable[Entry], keep: int | None = None) -> bool:
        """Drop the checkpoints of entries, except the one at `keep` and those of pinned entries. False: there were
        none."""
        dropped = False
        for entry in entries:
            kept = {
                at: checkpoint for at, checkpoint in entry.span.checkpoints.items() if at == keep or entry.is_pinned
            }
            if len(kept) < len(entry.span.checkpoints):
                dropped = True
                entry.span.checkpoints = kept
                self.recount(entry)
        self.version += dropped
        return dropped

    def usable_end(self, leaf: Node[Entry], end: int) -> int:
        """Return the position up to which the tokens of a leaf before `end` can be resumed: its last checkpoint, if
        the model needs checkpoints."""
        if not self.needs_checkpoints:
            return end
        return max((at for at in leaf.payload.span.checkpoints if leaf.start < at <= end), default=leaf.start)

    def _drop_oldest_checkpoints(self, path: tuple[Node[Entry], ...], resume_at: Iterable[int]) -> None:
        """Drop the oldest checkpoints of a path, except those at branches, where requests resume, those that are
        needed for `resume_at`, and those of pinned entries. Other branches of its entries keep theirs."""
        on_path = [(at, node) for node in path for at in node.payload.span.checkpoints if node.start < at <= node.end]
        kept = {node.end for node in path if len(node.children) > 1}
        kept |= {max((at for at, _ in on_path if at <= position), default=0) for position in resume_at}
        droppable = [(at, node.payload) for at, node in on_path if at not in kept and not node.payload.is_pinned]
        num_dropped = max(0, len(droppable) - self._max_checkpoints)
        for at, entry in sorted(droppable, key=lambda each: each[0])[:num_dropped]:
            del entry.span.checkpoints[at]
            self.recount(entry)


def _is_joinable(first: Entry, second: Entry) -> bool:
    """Whether two entries need not be apart: both are evictable, the second follows the first, and no other node
    begins between them."""
    if not first.is_evictable or not second.is_evictable or first.span.is_live or second.span.is_live:
        return False
    if first.span.end != second.span.position or first.target != second.target:
        return False
    last = next((node for node in first.nodes if node.end == first.span.end), None)
    return last is not None and len(last.children) == 1 and next(iter(last.children.values())).payload is second
