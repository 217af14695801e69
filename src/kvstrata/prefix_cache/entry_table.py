"""Entry table: the radix tree over cached spans, their bytes, and the leaves that may be evicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from kvstrata.prefix_cache.entries import DirtySets, Entry
from kvstrata.prefix_cache.eviction_order import Chosen, EvictionOrder, LeafValue, UseRecords
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.radix_tree import Inserted, Node, RadixTree
from kvstrata.prefix_cache.worth import PrefillCost, Reuse, ReuseClass
from kvstrata.spans.gather import num_arrays
from kvstrata.spans.marks import Mark
from kvstrata.spans.rewrite import shrink
from kvstrata.spans.span import empty_span

# What stays of a leaf that is cut short is a multiple of this.
QUANTUM_TOKENS = 256


class EvictionCandidates:
    def __init__(self, reuse: Reuse, ttl_s: float | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ttl_s = math.inf if ttl_s is None else ttl_s
        self._uses = UseRecords()
        self._order: EvictionOrder[Node[Entry]] = EvictionOrder(reuse, PrefillCost(), QUANTUM_TOKENS)
        self._superseded: set[Node[Entry]] = set()  # leaves and what is above them

    def record_use(self, nodes: Sequence[Node[Entry]], kind: ReuseClass, session: str = "") -> None:
        """A request goes on from these."""
        self._uses.record_use(nodes, kind, self._clock(), session)
        self._superseded.difference_update(nodes)
        for node in nodes:
            self.offer_node(node)

    def record_insert(self, inserted: Inserted[Entry], kind: ReuseClass, session: str = "") -> None:
        """A request filed its tokens."""
        self._uses.record_insert(inserted, kind, self._clock(), session)
        self._superseded.difference_update(inserted.path)

    def record_split(self, upper: Node[Entry], lower: Node[Entry]) -> None:
        """A node was split without a use of either half."""
        self._uses.record_split(upper, lower)
        if lower in self._superseded:
            self._superseded.add(upper)
        self.offer_node(lower)

    def supersede(self, node: Node[Entry], session: str) -> None:
        """The session has gone on elsewhere: the node goes first, unless others have used it."""
        if self._uses[node].session == session:
            self._superseded.add(node)
            self.offer_node(node)

    def is_superseded(self, node: Node[Entry]) -> bool:
        return node in self._superseded

    def superseded(self) -> list[Node[Entry]]:
        """All of them, children before their parents."""
        return sorted(self._superseded, key=lambda node: node.start, reverse=True)

    def record_merge(self, upper: Node[Entry], lower: Node[Entry]) -> None:
        """The lower one has the tokens of both now."""
        if upper not in self._superseded:
            self._superseded.discard(lower)
        self._uses.record_merge(upper, lower)
        self.forget_node(upper)

    def offer_node(self, node: Node[Entry]) -> None:
        """A node has changed: it may be a leaf that may go, or no longer."""
        entry = node.payload
        if not node.is_leaf or not entry.is_evictable:
            self._order.discard(node)
            return
        nbytes = entry.nbytes * node.num_tokens // max(1, entry.span.num_tokens)
        use = self._uses[node]
        expires_s = use.used_s + self._ttl_s
        known = LeafValue(
            nbytes, node.start, node.num_tokens, use.used_s, use.reuse_class, expires_s, entry.is_archived
        )
        self._order.add(node, known._replace(is_superseded=True) if node in self._superseded else known)

    def offer_last_node(self, entry: Entry) -> None:
        """The nodes of an entry lie on one path: only the last of them can be a leaf."""
        if entry.nodes:
            self.offer_node(entry.last_node)

    def withdraw_node(self, node: Node[Entry]) -> None:
        """It is no leaf any more."""
        self._order.discard(node)

    def forget_node(self, node: Node[Entry]) -> None:
        """It was removed."""
        self._superseded.discard(node)
        self._order.discard(node)
        self._uses.forget_node(node)

    def choose(self, need_bytes: int, *, spare_only: bool = False) -> list[Chosen[Node[Entry]]]:
        """See `EvictionOrder.choose`."""
        return self._order.choose(need_bytes, self._clock(), spare_only=spare_only)

    def has_expired(self, node: Node[Entry]) -> bool:
        """Whether no request asked for it in time."""
        return self._clock() >= self._uses[node].used_s + self._ttl_s

    def seconds_to_expiry(self) -> float:
        """Until a leaf has not been asked for in time; infinite where none waits for that."""
        return max(0.0, self._order.next_expiry_s() - self._clock())

    def last_use_s(self, entry: Entry) -> float:
        """When a request last went on from it."""
        return max((self._uses[node].used_s for node in entry.nodes), default=0.0)

    def unused_s(self, entry: Entry) -> float:
        """How long ago that was."""
        return self._clock() - self.last_use_s(entry)

    def last_use_of_end_s(self, entry: Entry) -> float:
        """When a request last went on from all of it, not only from what it shares with others."""
        return self._uses[entry.last_node].used_s

    def last_use_of_node_s(self, node: Node[Entry]) -> float:
        """When a request last went on from it."""
        return self._uses[node].used_s

    def now_s(self) -> float:
        """By the clock of those times."""
        return self._clock()


# An entry, or a load: that holds blocks until they are an entry's.
Holder = Hashable


class BlockResidency:
    """Touched by the thread that owns MLX alone. Keeps no load alive that its request has lost in a fault."""

    def __init__(self) -> None:
        self._keys: WeakKeyDictionary[Holder, set[bytes]] = WeakKeyDictionary()
        self._holders: dict[bytes, WeakSet[Holder]] = {}
        self._incomplete: WeakSet[Holder] = WeakSet()  # lost a block since they were recorded
        self._doubted: dict[Entry, None] = {}  # those of them that the owner has not been told of

    def begin_recording(self, entry: Entry) -> None:
        """The blocks of an entry are walked: what it lost before is written again."""
        self._incomplete.discard(entry)
        self._doubted.pop(entry, None)

    def record_block(self, holder: Holder, key: bytes) -> None:
        """Before the caller asks the tier whether the block is there: then no removal is missed."""
        self._keys.setdefault(holder, set()).add(key)
        self._holders.setdefault(key, WeakSet()).add(holder)

    def has_block(self, load: Holder, key: bytes) -> bool:
        """Whether a block of a load has not left since the load began."""
        return key in self._keys.get(load, ())

    def is_complete(self, entry: Entry) -> bool:
        """Whether no block has left since its blocks were recorded."""
        return entry not in self._incomplete

    def remove_block(self, key: bytes) -> list[Entry]:
        """A block has left. Returns the entries that had tokens in it."""
        holders = list(self._holders.pop(key, ()))
        for holder in holders:
            self._keys[holder].discard(key)
        self._incomplete.update(holders)
        return [holder for holder in holders if isinstance(holder, Entry)]

    def doubt_all(self) -> None:
        """Any block may have left."""
        self.forget_loads()
        self._incomplete.update(self._keys)
        self._doubted.update(dict.fromkeys(holder for holder in self._keys if isinstance(holder, Entry)))

    @property
    def has_doubted(self) -> bool:
        return bool(self._doubted)

    def take_doubted(self, max_entries: int) -> list[Entry]:
        """Some of the entries of which any block may have left."""
        return [self._doubted.popitem()[0] for _ in range(min(max_entries, len(self._doubted)))]

    def join(self, first: Entry, second: Entry) -> None:
        """The first entry has the tokens of both now."""
        if second in self._incomplete:
            self._incomplete.add(first)
        for key in self._keys.get(second, ()):
            self.record_block(first, key)
        self.forget(second)

    def forget_loads(self) -> None:
        """What is on its way from the disk is not there any more."""
        for load in [holder for holder in self._keys if not isinstance(holder, Entry)]:
            self.forget(load)

    def forget(self, holder: Holder) -> None:
        """It has left memory, or needs its blocks no longer."""
        self._incomplete.discard(holder)
        if isinstance(holder, Entry):
            self._doubted.pop(holder, None)
        for key in self._keys.pop(holder, ()):
            holders = self._holders[key]
            holders.discard(holder)
            if not holders:
                del self._holders[key]


# Tokens of what was evicted that are remembered, so that a miss can be explained.
GHOST_TOKENS = 1 << 20


class CacheListener(Protocol):
    """Told by the store, on the engine's thread. `ids` may change after the call."""

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        """All of `ids` is held now; the tokens from `start` on are new."""
        ...

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        """All of `ids` was held; the tokens from `start` on are not any more."""
        ...

    def cleared(self) -> None:
        """Nothing is held any more."""
        ...


class NoListener:
    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None: ...

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None: ...

    def cleared(self) -> None: ...


class EntryTable:
    """`max_bytes`: most that may be held; `max_arrays`: that MLX may have allocated for it, None: any number.
    `watcher` is told which tokens come and go."""

    def __init__(
        self,
        leaves: EvictionCandidates,
        *,
        max_bytes: int,
        max_arrays: int | None = None,
        watcher: CacheListener | None = None,
    ) -> None:
        self._candidates = leaves
        self._watcher = watcher or NoListener()
        self.max_bytes = max_bytes
        self._max_arrays = max_arrays
        self.tree: RadixTree[Entry] = RadixTree()
        self.ghosts: RadixTree[None] = RadixTree()
        self.entries: dict[Entry, None] = {}
        self.dirty_sets = DirtySets(self.entries)  # every change of an entry is noted here
        self.residency = BlockResidency()  # which blocks on the disk have the tokens of which entries
        self.version = 0  # changes with what a match may find
        self.num_changes = 0  # grows with the first thing that an operation changes
        self.is_broken = False  # an operation failed half-way: no operation may use the table any more
        self.nbytes = 0  # all spans and marks, but for the buffers of sequences that still run
        self.evictable_bytes = 0  # of those that are free to go
        self.num_arrays = 0  # of all spans, where they are counted

    @property
    def has_too_many_arrays(self) -> bool:
        return self._max_arrays is not None and self.num_arrays > self._max_arrays

    def add_entry(self, entry: Entry) -> None:
        self.num_changes += 1
        self.entries[entry] = None
        self.recount(entry)

    def record_use(self, path: Iterable[Node[Entry]], kind: ReuseClass, session: str = "") -> None:
        """A request goes on from these."""
        self.num_changes += 1
        nodes = list(path)
        self._candidates.record_use(nodes, kind, session)
        self.dirty_sets.mark_all_dirty(node.payload for node in nodes)

    def insert_entry(self, entry: Entry, ids: TokenIds) -> tuple[Node[Entry], ...]:
        """File all tokens so far under the entry, but for those that another entry has. Tells their path."""
        self.num_changes += 1
        self.version += 1
        inserted = self.tree.insert(entry.root_key, ids, entry)
        for node in inserted.path:
            node.payload.longest_end = max(node.payload.longest_end, len(ids))
        self.dirty_sets.mark_all_dirty(node.payload for node in inserted.path)
        self._candidates.record_insert(inserted, entry.reuse_class, entry.session)
        if inserted.outcome == "split":
            upper, lower = inserted.halves
            lower.payload.nodes.add(upper)
            self._candidates.offer_node(lower)
        if inserted.outcome in ("added", "split"):
            entry.nodes.add(inserted.path[-1])
            if len(inserted.path) > 1:
                self._candidates.withdraw_node(inserted.path[-2])
        if inserted.num_matched < len(ids):
            self._watcher.stored(entry.root_key, ids, inserted.num_matched)
        return inserted.path

    def split_node(self, node: Node[Entry], position: int) -> None:
        """In two, so that what comes behind may go by itself."""
        self.num_changes += 1
        self.version += 1
        upper = self.tree.split(node, position)
        node.payload.nodes.add(upper)
        self.dirty_sets.mark_dirty(node.payload)
        self._candidates.record_split(upper, node)

    def change(self, entry: Entry, **fields: object) -> None:
        """Set what decides whether it may go."""
        self.num_changes += 1
        was_free = entry.is_evictable
        for name, value in fields.items():
            setattr(entry, name, value)
        if was_free != entry.is_evictable:
            self.evictable_bytes += entry.nbytes if entry.is_evictable else -entry.nbytes
        self.recount(entry)
        if was_free != entry.is_evictable:
            self._candidates.offer_last_node(entry)

    def set_archived(self, entry: Entry, *, is_clean: bool) -> None:
        """Whether the disk has all of it: then it is worth less here."""
        if is_clean != entry.is_archived:
            self.num_changes += 1
            entry.is_archived = is_clean
            self.dirty_sets.mark_dirty(entry)
            self._candidates.offer_last_node(entry)

    def recount(self, entry: Entry) -> None:
        self.num_changes += 1
        self.dirty_sets.mark_dirty(entry)
        is_here = entry in self.entries
        if self._max_arrays is not None:
            before, entry.num_arrays = entry.num_arrays, num_arrays(entry.span) if is_here else 0
            self.num_arrays += entry.num_arrays - before
        # The buffers of a sequence that runs are counted with it.
        nbytes = (entry.span.owned_bytes if entry.is_running else entry.span.nbytes) if is_here else 0
        if nbytes == entry.nbytes:
            return
        self.nbytes += nbytes - entry.nbytes
        if entry.is_evictable:
            self.evictable_bytes += nbytes - entry.nbytes
        entry.nbytes = nbytes
        self._candidates.offer_last_node(entry)

    def drop_entry(self, entry: Entry) -> None:
        """An entry without nodes. Its memory goes now, even where other code still knows the entry."""
        self.num_changes += 1
        del self.entries[entry]
        self.dirty_sets.remove(entry)
        self.residency.forget(entry)
        entry.span = empty_span(entry.span.layout)
        self.recount(entry)

    def abandon(self) -> None:
        """Let go of everything, even what sequences use, whatever state it is in."""
        self.tree = RadixTree()
        self._watcher.cleared()
        for entry in list(self.entries):
            entry.nodes.clear()
            self.drop_entry(entry)

    def remove_leaf(self, node: Node[Entry]) -> None:
        """A leaf and its tokens. Memory that no node needs any more goes."""
        entry, parent = node.payload, node.parent
        self.num_changes += 1
        self.version += 1
        self._remember_evicted(node, node.start)
        self.tree.remove(node)
        self._candidates.forget_node(node)
        entry.nodes.discard(node)
        if parent is not None:
            self._rejoin(parent)
        self._fit(entry)

    def trim_leaf(self, node: Node[Entry], end: int) -> None:
        """The last tokens of a leaf."""
        self.num_changes += 1
        self.version += 1
        self._remember_evicted(node, end)
        self.tree.trim(node, end)
        self._fit(node.payload)
        self._candidates.offer_node(node)

    def join_spans(self, leaf: Node[Entry], max_spans: int) -> list[Entry]:
        """Join the shortest neighbours on the way to a leaf until there are no more spans than this, or no two
        that may be joined. Tells which entries have grown."""
        grown: dict[Entry, None] = {}
        while True:
            entries = list(dict.fromkeys(node.payload for node in leaf.path()))
            pairs = [(a, b) for a, b in pairwise(entries) if _joinable(a, b)]
            if len(entries) <= max_spans or not pairs:
                return [entry for entry in grown if entry in self.entries]
            first, second = min(pairs, key=lambda pair: pair[0].span.num_tokens + pair[1].span.num_tokens)
            self._join(first, second)
            grown[first] = None

    def _join(self, first: Entry, second: Entry) -> None:
        self.num_changes += 1
        self.version += 1
        last = next(node for node in first.nodes if node.end == first.span.end)
        if first.reused_end >= first.span.end:
            first.reused_end = max(first.span.end, second.reused_end)
        first.span.append(second.span)
        first.longest_end = max(first.longest_end, second.longest_end)
        first.is_archived = first.is_archived and second.is_archived
        self.residency.join(first, second)
        first.archived_token_bytes = min(first.archived_token_bytes, second.archived_token_bytes)
        for node in second.nodes:
            node.payload = first
            first.nodes.add(node)
        second.nodes.clear()
        self.drop_entry(second)
        self._rejoin(last)
        self.recount(first)

    def _fit(self, entry: Entry) -> None:
        """Let a span keep only what is filed."""
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

    def _rejoin(self, parent: Node[Entry]) -> None:
        """A node that lost a child: maybe it is one with the other, or a leaf."""
        merged = self.tree.merge(parent)
        if merged is not parent:
            parent.payload.nodes.discard(parent)
            self._candidates.record_merge(parent, merged)
        self.dirty_sets.mark_dirty(merged.payload)
        self._candidates.offer_node(merged)

    def _remember_evicted(self, leaf: Node[Entry], start: int) -> None:
        """Its tokens from `start` on are about to go: they are remembered, so that a miss can be explained."""
        if self.ghosts.num_tokens > GHOST_TOKENS:
            self.ghosts = RadixTree()
        tokens = np.concatenate([above.tokens for above in leaf.path()])
        self.ghosts.insert(leaf.root_key, tokens, None)
        self._watcher.removed(leaf.root_key, tokens, start)


def _joinable(first: Entry, second: Entry) -> bool:
    """They need not be apart: both are free to go, one ends where the other begins, and nothing else begins there."""
    if not first.is_evictable or not second.is_evictable or first.span.is_live or second.span.is_live:
        return False
    if first.span.end != second.span.position or first.target != second.target:
        return False
    last = next((node for node in first.nodes if node.end == first.span.end), None)
    return last is not None and len(last.children) == 1 and next(iter(last.children.values())).payload is second


class Checkpoints:
    """`are_needed`: the model can be resumed at marks only. `most`: on the way from the first token to the end."""

    def __init__(self, shelf: EntryTable, most: int, *, are_needed: bool) -> None:
        self._shelf = shelf
        self._most = most
        self.are_needed = are_needed

    def add_checkpoint(self, path: tuple[Node[Entry], ...], mark: Mark, resume_at: Iterable[int] = ()) -> None:
        """To the entry that holds the token before it. `resume_at`: where the conversation will be taken up again; the
        last mark before each of these stays while newer ones come."""
        holder = next(node.payload for node in path if node.start < mark.position <= node.end)
        if mark.position in holder.span.marks:
            return
        self._shelf.version += 1
        holder.span.marks[mark.position] = mark
        self._shelf.recount(holder)
        self._thin(path, resume_at)

    def drop_checkpoints(self, entries: Iterable[Entry], keep: int | None = None) -> bool:
        """All but the one at `keep`, and those that are pinned. False: there are none."""
        dropped = False
        for entry in entries:
            kept = {at: mark for at, mark in entry.span.marks.items() if at == keep or entry.is_pinned}
            if len(kept) < len(entry.span.marks):
                dropped = True
                entry.span.marks = kept
                self._shelf.recount(entry)
        self._shelf.version += dropped
        return dropped

    def usable_end(self, leaf: Node[Entry], end: int) -> int:
        """How much of what a leaf has before `end` can be resumed: nothing after its last mark, if marks are needed."""
        if not self.are_needed:
            return end
        return max((at for at in leaf.payload.span.marks if leaf.start < at <= end), default=leaf.start)

    def _thin(self, path: tuple[Node[Entry], ...], resume_at: Iterable[int]) -> None:
        """Keep the newest on a path, those where it branches, which is where requests resume, those that are needed
        for `resume_at`, and those that are pinned. What its entries hold on other branches is not touched."""
        on_path = [(at, node) for node in path for at in node.payload.span.marks if node.start < at <= node.end]
        kept = {node.end for node in path if len(node.children) > 1}
        kept |= {max((at for at, _ in on_path if at <= position), default=0) for position in resume_at}
        held = [(at, node.payload) for at, node in on_path if at not in kept and not node.payload.is_pinned]
        for at, entry in sorted(held, key=lambda place: place[0])[: max(0, len(held) - self._most)]:
            del entry.span.marks[at]
            self._shelf.recount(entry)
