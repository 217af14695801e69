"""Lets go of what is stored, from the leaves on: what has expired, what is worth least, what is cleared.

Who is worth least is the order's to say (`store/leaves.py`). What goes is handed to the disk first, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvstrata.index.tree import Node
from kvstrata.store.cold.spills import Handover, Spills
from kvstrata.store.entry import Entry
from kvstrata.store.failures import Failures
from kvstrata.store.leaves import Leaves
from kvstrata.store.losses import Losses
from kvstrata.store.marks import Marks
from kvstrata.store.precision.rewriting import Rewriting
from kvstrata.store.shelf import Shelf


class Evictor:
    def __init__(
        self,
        shelf: Shelf,
        leaves: Leaves,
        marks: Marks,
        spills: Spills,
        rewriting: Rewriting,
        losses: Losses,
        failures: Failures,
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
        self.shrink_to(self._shelf.held_bytes)

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
            chosen = self._leaves.choose(self._shelf.held_bytes - limit_bytes, spare_only=spare_only)
            # While one is written or removed, others may grow upward: what goes is known by its position.
            ends = [(each.leaf, each.leaf.start + each.keep_tokens) for each in chosen]
            for leaf, end in ends:
                if not self._leaves.has_expired(leaf) and not may_go(leaf):
                    self._leaves.offer(leaf)
                    return
                self.evict(leaf, end, until_s)
            if not chosen:
                return

    def drop_superseded(self) -> None:
        """What conversations have left behind is not to be written at the end."""
        for node in self._leaves.superseded():
            if node.is_leaf and node.payload.is_free:
                self.evict(node, node.start)

    def keep_arrays_few(self, until_s: float = math.inf) -> None:
        """What is worth least goes while there are more arrays than the machine allows. `until_s`: see `evict`."""
        while self._shelf.has_too_many_arrays and (chosen := self._leaves.choose(1)):
            for each in chosen:
                self.evict(each.leaf, each.leaf.start, until_s)

    def clear(self, under: bytes = b"") -> None:
        """Remove every leaf that is free to go, and what becomes one by it; under all roots that begin so."""
        shelf = self._shelf
        nodes = [node for root in shelf.tree.root_keys if root.startswith(under) for node in shelf.tree.nodes(root)]
        # Children before their parents.
        for node in reversed(nodes):
            if node in node.payload.nodes and node.is_leaf and node.payload.is_free:
                shelf.remove(node)
        for root in shelf.ghosts.root_keys:
            if root.startswith(under):
                shelf.ghosts.drop(root)

    def evict(self, leaf: Node[Entry], end: int, until_s: float = math.inf) -> None:
        """What a leaf has from a position on. Until `until_s` it may be encoded before it is handed to the disk; what
        is not encoded by then is handed over as it is."""
        has_expired = self._leaves.has_expired(leaf)
        handed = Handover(leaf.start, "expired") if has_expired else self.write_first(leaf, until_s, goes_now=True)
        end = self._marks.usable_end(leaf, end)
        keeps_some = leaf.start < end < leaf.end
        goes_from = end if keeps_some else leaf.start
        lost_tokens = max(0, leaf.end - max(goes_from, handed.end))
        self._losses.evicted(leaf.payload, lost_tokens, handed.reason, num_tokens=leaf.end - goes_from)
        if keeps_some:
            self._shelf.trim(leaf, end)
            if self._rewriting.precision.options.gathers:
                # What is left of it may be stored in fewer arrays.
                self._rewriting.mover.add(leaf.payload)
        else:
            self._shelf.remove(leaf)

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
        is_transcoding = self._rewriting.mover.has(leaf.payload)
        return self._spills.write_leaf(leaf, until_s, is_transcoding=is_transcoding, goes_now=goes_now)
