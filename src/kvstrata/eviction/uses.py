"""When each node of the tree was used last, and by what kind of request: what `EvictionOrder` must know of a leaf.

Nodes that are no leaves have it too: they become leaves when what is below them goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstrata.eviction.worth import Kind
from kvstrata.index.tree import Inserted, Node


class Use(NamedTuple):
    used_s: float
    kind: Kind


class Uses:
    def __init__(self) -> None:
        self._last: dict[Node[Any], Use] = {}

    def __getitem__(self, node: Node[Any]) -> Use:
        return self._last[node]

    def touch(self, path: Sequence[Node[Any]], kind: Kind, now_s: float) -> None:
        """A request used these nodes."""
        use = Use(now_s, kind)
        for node in path:
            self._last[node] = use

    def inserted(self, inserted: Inserted[Any], kind: Kind, now_s: float) -> None:
        """A request filed its tokens. The lower half of a split is what it did not use."""
        if inserted.halves:
            upper, lower = inserted.halves
            before = self._last[lower]
            self._last[upper] = before
            self._last[lower] = Use(before.used_s, before.kind.left)
        self.touch(inserted.path, kind, now_s)

    def forget(self, node: Node[Any]) -> None:
        """It was removed, or merged into another."""
        self._last.pop(node, None)
