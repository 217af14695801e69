"""Drops one conversation because a caller asked for it: what no other has of it, in memory and on the disk.

What others share stays, and so does what is pinned or in use. What was given to a tier that servers share stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvstrata.index.ids import TokenIds
from kvstrata.index.tree import Match, Node
from kvstrata.store.cold.cold import Cold
from kvstrata.store.entry import Entry
from kvstrata.store.search import Search
from kvstrata.store.shelf import Shelf
from kvstrata.tier.base import Removed
from kvstrata.tier.lookups import Lookup, answered

KeptBecause = Literal["", "pinned", "running"]


@dataclass(frozen=True)
class Dropped:
    tokens: int  # in memory
    nbytes: int
    kept_because: KeptBecause  # nothing was dropped, because of this; empty: what could go has gone
    on_disk: Lookup[Removed]


class Dropping:
    def __init__(self, search: Search, shelf: Shelf, cold: Cold) -> None:
        self._search = search
        self._shelf = shelf
        self._cold = cold

    def drop(self, ids: TokenIds, salt: str, *, is_dry: bool) -> Dropped:
        """`is_dry`: only tell what would go."""
        root = self._search.root_of(salt)
        match = self._shelf.tree.match(root, ids)
        going = _own(match)
        last = match.path[-1] if match.path else None
        if last is not None and not going and last.is_leaf and last.end == match.num_tokens:
            return Dropped(0, 0, "pinned" if last.payload.is_pinned else "running", answered(Removed()))
        tokens, nbytes = sum(node.num_tokens for node in going), sum(_nbytes(node) for node in going)
        start = going[-1].start if going else match.num_tokens
        on_disk = self._cold.drop(root, ids, start, is_dry=is_dry)
        if not is_dry:
            self._remove(going)
            self._forget(root, ids)
        return Dropped(tokens, nbytes, "", on_disk)

    def _remove(self, going: Sequence[Node[Entry]]) -> None:
        for node in going:
            self._shelf.remove(node)

    def _forget(self, root: bytes, ids: TokenIds) -> None:
        """It was not evicted: a later miss is not to be explained so."""
        match = self._shelf.ghosts.match(root, ids)
        last = match.path[-1] if match.path else None
        if last is not None and last.is_leaf and last.end == match.num_tokens:
            self._shelf.ghosts.remove(last)


def _own(match: Match[Entry]) -> list[Node[Entry]]:
    """The nodes that no other conversation has, the last one first, as far as they are free to go."""
    going: list[Node[Entry]] = []
    for node in reversed(match.path):
        if node.end > match.num_tokens or len(node.children) > bool(going) or not node.payload.is_free:
            break
        going.append(node)
    return going


def _nbytes(node: Node[Entry]) -> int:
    entry = node.payload
    return entry.nbytes * node.num_tokens // max(1, entry.span.num_tokens)
