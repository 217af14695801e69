"""A request that does not fit beside what it would go on from: some of that goes."""

from __future__ import annotations

from kvstrata.index.ids import Tokens
from kvstrata.index.tree import Node
from kvstrata.store.entry import Entry, Found
from kvstrata.store.evictor import Evictor
from kvstrata.store.marks import Marks
from kvstrata.store.precision.mover import Mover
from kvstrata.store.search import Search
from kvstrata.store.shelf import Shelf


class Shortening:
    def __init__(self, shelf: Shelf, search: Search, marks: Marks, evictor: Evictor, mover: Mover) -> None:
        self._shelf = shelf
        self._search = search
        self._marks = marks
        self._evictor = evictor
        self._mover = mover

    def shorten(self, tokens: Tokens, salt: str, need_bytes: int, *, keeps_used: bool) -> bool:
        """Let go of some of what a match of these would keep in memory, so many bytes if that can be: what it does not
        use first. False: there is nothing that may go."""
        held_bytes = self._shelf.held_bytes
        for entry in self._search.find(tokens, salt).entries:
            self._mover.finish(entry)
        found = self._search.find(tokens, salt)
        return self._shelf.held_bytes < held_bytes or self._shorten(found, need_bytes, keeps_used=keeps_used)

    def _shorten(self, found: Found, need_bytes: int, *, keeps_used: bool) -> bool:
        """Ends that the match does not use, then marks, then what it uses itself, the end first: that has a mark."""
        used = max(found.num_tokens, found.mark_position or 0)
        for entry in found.entries:
            used_end = max(min(node.end, used) for node in found.path if node.payload is entry)
            last = entry.last_node
            if last.end > used_end and self._cut(last, used_end, need_bytes):
                return True
        if self._marks.drop((entry for entry in found.entries if entry.is_free), found.mark_position):
            return True
        return not keeps_used and bool(found.path) and self._cut(found.path[-1], 0, need_bytes)

    def _cut(self, node: Node[Entry], start: int, need_bytes: int) -> bool:
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
        self._evictor.evict(leaf, max(start, leaf.end - need_tokens))
        return True
