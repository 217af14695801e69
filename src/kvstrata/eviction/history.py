"""What was asked for lately, whether it is still stored or not: tokens and times only, a few bytes for each token.

A store that learns only from its own hits never sees what it evicted too early. This remembers prompts for several
times as long as the store can hold them, tells how much of a prompt was known, and
tells `Reuse` when a use that it awaits has come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstrata.eviction.leaf_queue import LeafQueue
from kvstrata.eviction.worth import AwaitedUse, Kind, Reuse
from kvstrata.index.ids import Tokens, as_ids
from kvstrata.index.tree import Inserted, Node, Tree

# How many times as long as the store can hold prompts they are remembered: what returns later is not learned from.
HISTORY_FACTOR = 8


class Seen(NamedTuple):
    """The last use of a node."""

    awaited: AwaitedUse
    kind: Kind
    used_s: float


def kind_of(known_tokens: int, num_tokens: int) -> Kind:
    """Of a request, by how much of its prompt was asked for before."""
    return Kind.CONTINUED if 2 * known_tokens >= num_tokens else Kind.FRESH


class History:
    """`store_tokens` tells about how many the store can hold now."""

    def __init__(self, reuse: Reuse, store_tokens: Callable[[], int]) -> None:
        self._reuse = reuse
        self._store_tokens = store_tokens
        self._tree: Tree[Seen | None] = Tree()
        self._leaves: LeafQueue[Node[Seen | None]] = LeafQueue()

    @property
    def num_tokens(self) -> int:
        return self._tree.num_tokens

    def known_tokens(self, root_key: bytes, tokens: Tokens) -> int:
        """How far a prompt was asked for before, by whatever prompt."""
        return self._tree.match(root_key, tokens).num_tokens

    def asked(self, root_key: bytes, tokens: Tokens, now_s: float) -> Kind:
        """Remember a prompt. Says of which kind the nodes are that it uses."""
        wanted = as_ids(tokens)
        inserted = self._tree.insert(root_key, wanted, None)
        kind = kind_of(inserted.num_matched, len(wanted))
        self._split(inserted)
        for node in inserted.path:
            self._use(node, min(node.end, len(wanted)) - node.start, kind, now_s)
            self._leaves.discard(node)
        if inserted.path and inserted.path[-1].is_leaf:
            self._put(inserted.path[-1])
        most = HISTORY_FACTOR * self._store_tokens()
        while self._tree.num_tokens > most:
            self._forget_oldest(now_s)
        return kind

    def _split(self, inserted: Inserted[Seen | None]) -> None:
        """The upper half takes over the awaited use; the lower one was not used again so far, and waits as another
        kind."""
        if not inserted.halves:
            return
        _, lower = inserted.halves
        seen = lower.payload
        assert seen is not None
        kind = seen.kind.left
        lower.payload = Seen(self._reuse.opened(kind, lower.num_tokens, seen.used_s), kind, seen.used_s)
        if lower.is_leaf:
            self._put(lower)

    def _use(self, node: Node[Seen | None], num_tokens: int, kind: Kind, now_s: float) -> None:
        if node.payload is not None:
            self._reuse.reused(node.payload.awaited, num_tokens, now_s)
        node.payload = Seen(self._reuse.opened(kind, node.num_tokens, now_s), kind, now_s)

    def _put(self, leaf: Node[Seen | None]) -> None:
        assert leaf.payload is not None
        self._leaves.put(leaf, leaf.payload.used_s, leaf.start)

    def _forget_oldest(self, now_s: float) -> None:
        leaf = self._leaves.oldest()
        assert leaf is not None
        assert leaf.payload is not None
        self._reuse.forgotten(leaf.payload.awaited, now_s)
        self._leaves.discard(leaf)
        self._tree.remove(leaf)
        if leaf.parent is not None and leaf.parent.is_leaf:
            self._put(leaf.parent)
