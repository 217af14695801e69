"""When each node of the tree was used last, by what kind of request, and whether by one session alone: what
`EvictionOrder` must know of a leaf.

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
    session: str = ""  # the only one that ever used it; empty: none, or several


class Uses:
    def __init__(self) -> None:
        self._last: dict[Node[Any], Use] = {}

    def __getitem__(self, node: Node[Any]) -> Use:
        return self._last[node]

    def touch(self, path: Sequence[Node[Any]], kind: Kind, now_s: float, session: str = "") -> None:
        """A request used these nodes."""
        use, shared = Use(now_s, kind, session), Use(now_s, kind)
        for node in path:
            before = self._last.get(node)
            self._last[node] = use if before is None or before.session == session else shared

    def inserted(self, inserted: Inserted[Any], kind: Kind, now_s: float, session: str = "") -> None:
        """A request filed its tokens. The lower half of a split is what it did not use."""
        if inserted.halves:
            self.split(*inserted.halves)
        self.touch(inserted.path, kind, now_s, session)

    def split(self, upper: Node[Any], lower: Node[Any]) -> None:
        """A node was split, because a request goes on from the upper half alone."""
        before = self._last[lower]
        self._last[upper] = before
        self._last[lower] = before._replace(kind=before.kind.left)

    def merged(self, upper: Node[Any], lower: Node[Any]) -> None:
        """The lower one has the tokens of both now."""
        above, below = self._last.pop(upper), self._last[lower]
        if above.session != below.session:
            self._last[lower] = below._replace(session="")

    def forget(self, node: Node[Any]) -> None:
        """It was removed."""
        self._last.pop(node, None)
