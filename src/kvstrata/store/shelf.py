"""Where entries stand: the index, what they take, and who has to go when room is needed.

Knows how many bytes are held and which of them are free to go. Does not know why something is stored as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from kvstrata.eviction.history import History
from kvstrata.eviction.order import Eviction
from kvstrata.eviction.uses import Uses
from kvstrata.eviction.worth import Kind, PrefillCost, Reuse
from kvstrata.index.ids import TokenIds
from kvstrata.index.tree import Node, Tree
from kvstrata.spans.gather import num_arrays
from kvstrata.spans.marks import Mark
from kvstrata.spans.span import empty_span
from kvstrata.store.entry import Entry, Found
from kvstrata.store.journal import Journal

# Tokens of what was evicted that are remembered, so that a miss can be explained.
GHOST_TOKENS = 1 << 20
# What stays of a leaf that is cut short is a multiple of this.
QUANTUM_TOKENS = 256


class Shelf:
    def __init__(
        self,
        *,
        needs_marks: bool,
        max_tokens: int,
        ttl_s: float | None,
        before_eviction: Callable[[Node[Entry]], None],
        evicted: Callable[[Node[Entry], int], None],
        trimmed: Callable[[Entry], None] = lambda _: None,
        clock: Callable[[], float],
        counts_arrays: bool = False,
    ) -> None:
        self._before_eviction = before_eviction  # the last chance to keep a leaf elsewhere
        self._trimmed = trimmed  # told which entry has been cut short: it may be stored in another way now
        self._evicted = evicted  # told what of a leaf goes: its tokens from a position on
        self.tree: Tree[Entry] = Tree()
        self.ghosts: Tree[None] = Tree()
        self.entries: dict[Entry, None] = {}
        self.journal = Journal()  # every change of an entry is noted here
        self.version = 0  # changes with what a match may find
        self.held_bytes = 0  # all spans and marks, but for the buffers of sequences that still run
        self.free_bytes = 0  # of those that are free to go
        self.num_arrays = 0  # of all spans, where they are counted
        self.num_evicted_tokens = 0
        self._counts_arrays = counts_arrays
        self._needs_marks = needs_marks
        self._clock = clock
        self._ttl_s = math.inf if ttl_s is None else ttl_s
        reuse = Reuse()
        self._history = History(reuse, max_tokens)
        self._uses = Uses()
        self._eviction: Eviction[Node[Entry]] = Eviction(reuse, PrefillCost(), QUANTUM_TOKENS)

    def add(self, entry: Entry) -> None:
        self.entries[entry] = None
        self.recount(entry)

    def resize(self, max_tokens: int) -> None:
        """About so many tokens fit from now on."""
        self._history.resize(max_tokens)

    def known_tokens(self, root_key: bytes, ids: TokenIds) -> int:
        """How far a prompt was asked for before, stored or not."""
        return self._history.known_tokens(root_key, ids)

    def asked(self, root_key: bytes, ids: TokenIds) -> None:
        """A request began with this prompt."""
        self._history.asked(root_key, ids, self._clock())

    def touch(self, path: Iterable[Node[Entry]], kind: Kind) -> None:
        """A request goes on from these."""
        nodes = list(path)
        self._uses.touch(nodes, kind, self._clock())
        for node in nodes:
            self._offer(node)
            self.journal.note(node.payload)

    def insert(self, entry: Entry, ids: TokenIds) -> tuple[Node[Entry], ...]:
        """File all tokens so far under the entry, but for those that another entry has. Tells their path."""
        self.version += 1
        inserted = self.tree.insert(entry.root_key, ids, entry)
        self.journal.note_all(node.payload for node in inserted.path)
        self._uses.inserted(inserted, entry.kind, self._clock())
        if inserted.outcome == "split":
            upper, lower = inserted.halves
            lower.payload.nodes.add(upper)
            self._offer(lower)
        if inserted.outcome in ("added", "split"):
            entry.nodes.add(inserted.path[-1])
            if len(inserted.path) > 1:
                self._eviction.discard(inserted.path[-2])
        return inserted.path

    def add_mark(self, path: tuple[Node[Entry], ...], mark: Mark, max_marks: int) -> None:
        """To the entry that holds the token before it."""
        holder = next(node.payload for node in path if node.start < mark.position <= node.end)
        if mark.position in holder.span.marks:
            return
        self.version += 1
        holder.span.marks[mark.position] = mark
        self.recount(holder)
        self._thin_marks(path, max_marks)

    def change(self, entry: Entry, **fields: object) -> None:
        """Set what decides whether it may go."""
        was_free = entry.is_free
        for name, value in fields.items():
            setattr(entry, name, value)
        if was_free != entry.is_free:
            self.free_bytes += entry.nbytes if entry.is_free else -entry.nbytes
        self.recount(entry)
        if was_free != entry.is_free:
            self._offer_end(entry)

    def set_clean(self, entry: Entry, *, is_clean: bool) -> None:
        """Whether the disk has all of it: then it is worth less here."""
        if is_clean != entry.is_clean:
            entry.is_clean = is_clean
            self.journal.note(entry)
            self._offer_end(entry)

    def used_s(self, entry: Entry) -> float:
        """When a request last went on from it."""
        return max((self._uses[node].used_s for node in entry.nodes), default=0.0)

    def unused_s(self, entry: Entry) -> float:
        """How long ago that was."""
        return self._clock() - self.used_s(entry)

    def end_used_s(self, entry: Entry) -> float:
        """When a request last went on from all of it, not only from what it shares with others."""
        return self._uses[entry.last_node].used_s

    def recount(self, entry: Entry) -> None:
        self.journal.note(entry)
        is_here = entry in self.entries
        if self._counts_arrays:
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
        self._offer_end(entry)

    def shrink_to(
        self,
        limit_bytes: int,
        may_go: Callable[[Node[Entry]], bool] = lambda _: True,
        *,
        spare_only: bool = False,
    ) -> None:
        """Evict what has expired, and from the leaves until no more than this is held, or only what is in use. It ends
        at the first leaf of which `may_go` says no. `spare_only`: none but those that the disk has too."""
        while True:
            need_bytes = self.held_bytes - limit_bytes
            chosen = self._eviction.choose(need_bytes, self._clock(), spare_only=spare_only)
            # While one is written or removed, others may grow upward: what goes is known by its position.
            ends = [(drop.leaf, drop.leaf.start + drop.keep_tokens) for drop in chosen]
            for leaf, end in ends:
                if not self.has_expired(leaf) and not may_go(leaf):
                    self._offer(leaf)
                    return
                self._evict(leaf, end)
            if not chosen:
                return

    def has_expired(self, node: Node[Entry]) -> bool:
        """Whether no request asked for it in time."""
        return self._clock() >= self._uses[node].used_s + self._ttl_s

    def seconds_to_expiry(self) -> float:
        return max(0.0, self._eviction.next_expiry_s() - self._clock())

    def clear(self, under: bytes = b"") -> None:
        """Remove every leaf that is free to go, and what becomes one by it; under all roots that begin so."""
        nodes = [node for root in self.tree.root_keys if root.startswith(under) for node in self.tree.nodes(root)]
        # Children before their parents.
        for node in reversed(nodes):
            if node in node.payload.nodes and node.is_leaf and node.payload.is_free:
                self.remove(node)
        for root in self.ghosts.root_keys:
            if root.startswith(under):
                self.ghosts.drop(root)

    def shorten(self, found: Found, need_bytes: int, *, keeps_used: bool) -> bool:
        """Let go of some of what a match keeps from going, of so many bytes if that can be: ends that it does not use,
        then marks, then what it uses itself, the end first: that has a mark. False: there is nothing that may go."""
        used = max(found.num_tokens, found.mark_position or 0)
        for entry in found.entries:
            used_end = max(min(node.end, used) for node in found.path if node.payload is entry)
            last = entry.last_node
            if last.end > used_end and self._shorten(last, used_end, need_bytes):
                return True
        if self.drop_marks((entry for entry in found.entries if entry.is_free), found.mark_position):
            return True
        return not keeps_used and bool(found.path) and self._shorten(found.path[-1], 0, need_bytes)

    def _shorten(self, node: Node[Entry], start: int, need_bytes: int) -> bool:
        """A node from its end on, but for what is before `start`; all that hangs on it goes first, a leaf at a time."""
        leaf = node
        while not leaf.is_leaf:
            leaf = next(iter(leaf.children.values()))
        entry = leaf.payload
        if not entry.is_free:
            return False
        need_tokens = (
            -(-need_bytes * entry.span.num_tokens // max(1, entry.nbytes)) if leaf is node else leaf.num_tokens
        )
        self._evict(leaf, max(start, leaf.end - need_tokens))
        return True

    def drop_marks(self, entries: Iterable[Entry], keep: int | None = None) -> bool:
        """All but the one at `keep`, and those that are pinned. False: there are none."""
        dropped = False
        for entry in entries:
            kept = {at: mark for at, mark in entry.span.marks.items() if at == keep or entry.is_pinned}
            if len(kept) < len(entry.span.marks):
                dropped = True
                entry.span.marks = kept
                self.recount(entry)
        self.version += dropped
        return dropped

    def evict_least(self) -> bool:
        """All of what has expired, or of the leaf that is worth least. False: everything is in use."""
        chosen = self._eviction.choose(1, self._clock())
        for drop in chosen:
            self._evict(drop.leaf, drop.leaf.start)
        return bool(chosen)

    def _evict(self, leaf: Node[Entry], end: int) -> None:
        """What a leaf has from a position on."""
        self._before_eviction(leaf)
        if self._needs_marks:
            # What follows the last mark is of no use to anybody.
            end = max((at for at in leaf.payload.span.marks if leaf.start < at <= end), default=leaf.start)
        goes_from = end if leaf.start < end < leaf.end else leaf.start
        self.num_evicted_tokens += leaf.end - goes_from
        self._evicted(leaf, goes_from)
        if leaf.start < end < leaf.end:
            self.trim(leaf, end)
            self._trimmed(leaf.payload)
        else:
            self.remove(leaf)

    def _offer(self, node: Node[Entry]) -> None:
        """Let the policy know what may become of a node."""
        entry = node.payload
        if not node.is_leaf or not entry.is_free:
            self._eviction.discard(node)
            return
        nbytes = entry.nbytes * node.num_tokens // max(1, entry.span.num_tokens)
        use = self._uses[node]
        self._eviction.add(
            node,
            nbytes=nbytes,
            start=node.start,
            num_tokens=node.num_tokens,
            used_s=use.used_s,
            kind=use.kind,
            expires_s=use.used_s + self._ttl_s,
            is_spare=entry.is_clean,
        )

    def _offer_end(self, entry: Entry) -> None:
        """Its nodes lie on one path: only the last of them can be a leaf."""
        if entry.nodes:
            self._offer(entry.last_node)

    def drop(self, entry: Entry) -> None:
        """An entry without nodes. Its memory goes now, even where other code still knows the entry."""
        del self.entries[entry]
        entry.span = empty_span(entry.span.layout)
        self.recount(entry)

    def abandon(self) -> None:
        """Let go of everything, even what sequences use, whatever state it is in."""
        self.tree = Tree()
        for entry in list(self.entries):
            entry.nodes.clear()
            self.drop(entry)

    def remove(self, node: Node[Entry]) -> None:
        """A leaf and its tokens. Memory that no node needs any more goes."""
        entry, parent = node.payload, node.parent
        self.version += 1
        self._remember(node)
        self._eviction.discard(node)
        self.tree.remove(node)
        self._uses.forget(node)
        entry.nodes.discard(node)
        if parent is not None:
            self._rejoin(parent)
        self._fit(entry)

    def trim(self, node: Node[Entry], end: int) -> None:
        """The last tokens of a leaf."""
        self.version += 1
        self._remember(node)
        self.tree.trim(node, end)
        self._fit(node.payload)
        self._offer(node)

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
        self.version += 1
        last = next(node for node in first.nodes if node.end == first.span.end)
        if first.asked_twice >= first.span.end:
            first.asked_twice = max(first.span.end, second.asked_twice)
        first.span.append(second.span)
        first.is_clean = first.is_clean and second.is_clean
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
                span.shrink(layer)
        self.recount(entry)

    def _rejoin(self, parent: Node[Entry]) -> None:
        """A node that lost a child: maybe it is one with the other, or a leaf."""
        merged = self.tree.merge(parent)
        if merged is not parent:
            parent.payload.nodes.discard(parent)
            self._eviction.discard(parent)
            self._uses.forget(parent)
        self.journal.note(merged.payload)
        self._offer(merged)

    def _remember(self, node: Node[Entry]) -> None:
        if self.ghosts.num_tokens > GHOST_TOKENS:
            self.ghosts = Tree()
        tokens = np.concatenate([above.tokens for above in node.path()])
        self.ghosts.insert(node.root_key, tokens, None)

    def _thin_marks(self, path: tuple[Node[Entry], ...], max_marks: int) -> None:
        """Keep the newest on a path, those where it branches, which is where requests resume, and those that are
        pinned. What its entries hold on other branches is not touched."""
        branches = {node.end for node in path if len(node.children) > 1}
        on_path = [(at, node) for node in path for at in node.payload.span.marks if node.start < at <= node.end]
        held = [(at, node.payload) for at, node in on_path if at not in branches and not node.payload.is_pinned]
        for at, entry in sorted(held, key=lambda place: place[0])[: max(0, len(held) - max_marks)]:
            del entry.span.marks[at]
            self.recount(entry)


def _joinable(first: Entry, second: Entry) -> bool:
    """They need not be apart: both are free to go, one ends where the other begins, and nothing else begins there."""
    if not first.is_free or not second.is_free or first.span.is_live or second.span.is_live:
        return False
    if first.span.end != second.span.position or first.target != second.target:
        return False
    last = next((node for node in first.nodes if node.end == first.span.end), None)
    return last is not None and len(last.children) == 1 and next(iter(last.children.values())).payload is second
