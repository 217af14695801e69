"""Where entries stand: the index, and what they take.

Knows how many bytes are held and which of them are free to go. Does not know why something is stored as it is, nor who
has to go when room is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from kvstrata.eviction.worth import Kind
from kvstrata.index.ids import TokenIds
from kvstrata.index.tree import Node, Tree
from kvstrata.spans.gather import num_arrays
from kvstrata.spans.rewrite import shrink
from kvstrata.spans.span import empty_span
from kvstrata.store.cold.residency import Residency
from kvstrata.store.entry import Entry
from kvstrata.store.journal import Journal
from kvstrata.store.leaves import Leaves
from kvstrata.store.watching import NoWatcher, Watcher

# Tokens of what was evicted that are remembered, so that a miss can be explained.
GHOST_TOKENS = 1 << 20


class Shelf:
    """`max_bytes`: most that may be held; `max_arrays`: that MLX may have allocated for it, None: any number.
    `watcher` is told which tokens come and go."""

    def __init__(
        self, leaves: Leaves, *, max_bytes: int, max_arrays: int | None = None, watcher: Watcher | None = None
    ) -> None:
        self._leaves = leaves
        self._watcher = watcher or NoWatcher()
        self.max_bytes = max_bytes
        self._max_arrays = max_arrays
        self.tree: Tree[Entry] = Tree()
        self.ghosts: Tree[None] = Tree()
        self.entries: dict[Entry, None] = {}
        self.journal = Journal(self.entries)  # every change of an entry is noted here
        self.residency = Residency()  # which blocks on the disk have the tokens of which entries
        self.version = 0  # changes with what a match may find
        self.num_changes = 0  # grows with the first thing that an operation changes
        self.is_broken = False  # an operation failed half-way: no operation may use the table any more
        self.held_bytes = 0  # all spans and marks, but for the buffers of sequences that still run
        self.free_bytes = 0  # of those that are free to go
        self.num_arrays = 0  # of all spans, where they are counted

    @property
    def has_too_many_arrays(self) -> bool:
        return self._max_arrays is not None and self.num_arrays > self._max_arrays

    def add(self, entry: Entry) -> None:
        self.num_changes += 1
        self.entries[entry] = None
        self.recount(entry)

    def touch(self, path: Iterable[Node[Entry]], kind: Kind, session: str = "") -> None:
        """A request goes on from these."""
        self.num_changes += 1
        nodes = list(path)
        self._leaves.touch(nodes, kind, session)
        self.journal.note_all(node.payload for node in nodes)

    def insert(self, entry: Entry, ids: TokenIds) -> tuple[Node[Entry], ...]:
        """File all tokens so far under the entry, but for those that another entry has. Tells their path."""
        self.num_changes += 1
        self.version += 1
        inserted = self.tree.insert(entry.root_key, ids, entry)
        for node in inserted.path:
            node.payload.longest_end = max(node.payload.longest_end, len(ids))
        self.journal.note_all(node.payload for node in inserted.path)
        self._leaves.inserted(inserted, entry.kind, entry.session)
        if inserted.outcome == "split":
            upper, lower = inserted.halves
            lower.payload.nodes.add(upper)
            self._leaves.offer(lower)
        if inserted.outcome in ("added", "split"):
            entry.nodes.add(inserted.path[-1])
            if len(inserted.path) > 1:
                self._leaves.discard(inserted.path[-2])
        if inserted.num_matched < len(ids):
            self._watcher.stored(entry.root_key, ids, inserted.num_matched)
        return inserted.path

    def split(self, node: Node[Entry], position: int) -> None:
        """In two, so that what comes behind may go by itself."""
        self.num_changes += 1
        self.version += 1
        upper = self.tree.split(node, position)
        node.payload.nodes.add(upper)
        self.journal.note(node.payload)
        self._leaves.split(upper, node)

    def change(self, entry: Entry, **fields: object) -> None:
        """Set what decides whether it may go."""
        self.num_changes += 1
        was_free = entry.is_free
        for name, value in fields.items():
            setattr(entry, name, value)
        if was_free != entry.is_free:
            self.free_bytes += entry.nbytes if entry.is_free else -entry.nbytes
        self.recount(entry)
        if was_free != entry.is_free:
            self._leaves.offer_end(entry)

    def set_clean(self, entry: Entry, *, is_clean: bool) -> None:
        """Whether the disk has all of it: then it is worth less here."""
        if is_clean != entry.is_clean:
            self.num_changes += 1
            entry.is_clean = is_clean
            self.journal.note(entry)
            self._leaves.offer_end(entry)

    def recount(self, entry: Entry) -> None:
        self.num_changes += 1
        self.journal.note(entry)
        is_here = entry in self.entries
        if self._max_arrays is not None:
            before, entry.num_arrays = entry.num_arrays, num_arrays(entry.span) if is_here else 0
            self.num_arrays += entry.num_arrays - before
        # The buffers of a sequence that runs are counted with it.
        nbytes = (entry.span.owned_bytes if entry.is_running else entry.span.nbytes) if is_here else 0
        if nbytes == entry.nbytes:
            return
        self.held_bytes += nbytes - entry.nbytes
        if entry.is_free:
            self.free_bytes += nbytes - entry.nbytes
        entry.nbytes = nbytes
        self._leaves.offer_end(entry)

    def drop(self, entry: Entry) -> None:
        """An entry without nodes. Its memory goes now, even where other code still knows the entry."""
        self.num_changes += 1
        del self.entries[entry]
        self.journal.remove(entry)
        self.residency.forget(entry)
        entry.span = empty_span(entry.span.layout)
        self.recount(entry)

    def abandon(self) -> None:
        """Let go of everything, even what sequences use, whatever state it is in."""
        self.tree = Tree()
        self._watcher.cleared()
        for entry in list(self.entries):
            entry.nodes.clear()
            self.drop(entry)

    def remove(self, node: Node[Entry]) -> None:
        """A leaf and its tokens. Memory that no node needs any more goes."""
        entry, parent = node.payload, node.parent
        self.num_changes += 1
        self.version += 1
        self._goes(node, node.start)
        self.tree.remove(node)
        self._leaves.forget(node)
        entry.nodes.discard(node)
        if parent is not None:
            self._rejoin(parent)
        self._fit(entry)

    def trim(self, node: Node[Entry], end: int) -> None:
        """The last tokens of a leaf."""
        self.num_changes += 1
        self.version += 1
        self._goes(node, end)
        self.tree.trim(node, end)
        self._fit(node.payload)
        self._leaves.offer(node)

    def join_along(self, leaf: Node[Entry], max_spans: int) -> list[Entry]:
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
        if first.asked_twice >= first.span.end:
            first.asked_twice = max(first.span.end, second.asked_twice)
        first.span.append(second.span)
        first.longest_end = max(first.longest_end, second.longest_end)
        first.is_clean = first.is_clean and second.is_clean
        self.residency.join(first, second)
        first.clean_token_bytes = min(first.clean_token_bytes, second.clean_token_bytes)
        for node in second.nodes:
            node.payload = first
            first.nodes.add(node)
        second.nodes.clear()
        self.drop(second)
        self._rejoin(last)
        self.recount(first)

    def _fit(self, entry: Entry) -> None:
        """Let a span keep only what is filed."""
        if not entry.nodes:
            self.drop(entry)
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
            self._leaves.merged(parent, merged)
        self.journal.note(merged.payload)
        self._leaves.offer(merged)

    def _goes(self, leaf: Node[Entry], start: int) -> None:
        """Its tokens from `start` on are about to go: they are remembered, so that a miss can be explained."""
        if self.ghosts.num_tokens > GHOST_TOKENS:
            self.ghosts = Tree()
        tokens = np.concatenate([above.tokens for above in leaf.path()])
        self.ghosts.insert(leaf.root_key, tokens, None)
        self._watcher.removed(leaf.root_key, tokens, start)


def _joinable(first: Entry, second: Entry) -> bool:
    """They need not be apart: both are free to go, one ends where the other begins, and nothing else begins there."""
    if not first.is_free or not second.is_free or first.span.is_live or second.span.is_live:
        return False
    if first.span.end != second.span.position or first.target != second.target:
        return False
    last = next((node for node in first.nodes if node.end == first.span.end), None)
    return last is not None and len(last.children) == 1 and next(iter(last.children.values())).payload is second
