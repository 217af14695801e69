"""Which leaves may go, and in which order: when each node was used last, and what it is worth.

Follows the shelf, which tells what may have become of a node. Removes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvstrata.eviction.order import Chosen, EvictionOrder, Leaf
from kvstrata.eviction.uses import Uses
from kvstrata.eviction.worth import Kind, PrefillCost, Reuse
from kvstrata.index.tree import Inserted, Node
from kvstrata.store.entry import Entry

# What stays of a leaf that is cut short is a multiple of this.
QUANTUM_TOKENS = 256


class Leaves:
    def __init__(self, reuse: Reuse, ttl_s: float | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ttl_s = math.inf if ttl_s is None else ttl_s
        self._uses = Uses()
        self._order: EvictionOrder[Node[Entry]] = EvictionOrder(reuse, PrefillCost(), QUANTUM_TOKENS)
        self._superseded: set[Node[Entry]] = set()  # leaves and what is above them

    def touch(self, nodes: Sequence[Node[Entry]], kind: Kind, session: str = "") -> None:
        """A request goes on from these."""
        self._uses.touch(nodes, kind, self._clock(), session)
        self._superseded.difference_update(nodes)
        for node in nodes:
            self.offer(node)

    def inserted(self, inserted: Inserted[Entry], kind: Kind, session: str = "") -> None:
        """A request filed its tokens."""
        self._uses.inserted(inserted, kind, self._clock(), session)
        self._superseded.difference_update(inserted.path)

    def split(self, upper: Node[Entry], lower: Node[Entry]) -> None:
        """A node was split without a use of either half."""
        self._uses.split(upper, lower)
        if lower in self._superseded:
            self._superseded.add(upper)
        self.offer(lower)

    def supersede(self, node: Node[Entry], session: str) -> None:
        """The session has gone on elsewhere: the node goes first, unless others have used it."""
        if self._uses[node].session == session:
            self._superseded.add(node)
            self.offer(node)

    def is_superseded(self, node: Node[Entry]) -> bool:
        return node in self._superseded

    def superseded(self) -> list[Node[Entry]]:
        """All of them, children before their parents."""
        return sorted(self._superseded, key=lambda node: node.start, reverse=True)

    def merged(self, upper: Node[Entry], lower: Node[Entry]) -> None:
        """The lower one has the tokens of both now."""
        if upper not in self._superseded:
            self._superseded.discard(lower)
        self._uses.merged(upper, lower)
        self.forget(upper)

    def offer(self, node: Node[Entry]) -> None:
        """A node has changed: it may be a leaf that may go, or no longer."""
        entry = node.payload
        if not node.is_leaf or not entry.is_free:
            self._order.discard(node)
            return
        nbytes = entry.nbytes * node.num_tokens // max(1, entry.span.num_tokens)
        use = self._uses[node]
        expires_s = use.used_s + self._ttl_s
        known = Leaf(nbytes, node.start, node.num_tokens, use.used_s, use.kind, expires_s, entry.is_clean)
        self._order.add(node, known._replace(is_superseded=True) if node in self._superseded else known)

    def offer_end(self, entry: Entry) -> None:
        """The nodes of an entry lie on one path: only the last of them can be a leaf."""
        if entry.nodes:
            self.offer(entry.last_node)

    def discard(self, node: Node[Entry]) -> None:
        """It is no leaf any more."""
        self._order.discard(node)

    def forget(self, node: Node[Entry]) -> None:
        """It was removed."""
        self._superseded.discard(node)
        self._order.discard(node)
        self._uses.forget(node)

    def choose(self, need_bytes: int, *, spare_only: bool = False) -> list[Chosen[Node[Entry]]]:
        """See `EvictionOrder.choose`."""
        return self._order.choose(need_bytes, self._clock(), spare_only=spare_only)

    def has_expired(self, node: Node[Entry]) -> bool:
        """Whether no request asked for it in time."""
        return self._clock() >= self._uses[node].used_s + self._ttl_s

    def seconds_to_expiry(self) -> float:
        """Until a leaf has not been asked for in time; infinite where none waits for that."""
        return max(0.0, self._order.next_expiry_s() - self._clock())

    def used_s(self, entry: Entry) -> float:
        """When a request last went on from it."""
        return max((self._uses[node].used_s for node in entry.nodes), default=0.0)

    def unused_s(self, entry: Entry) -> float:
        """How long ago that was."""
        return self._clock() - self.used_s(entry)

    def end_used_s(self, entry: Entry) -> float:
        """When a request last went on from all of it, not only from what it shares with others."""
        return self._uses[entry.last_node].used_s

    def node_used_s(self, node: Node[Entry]) -> float:
        """When a request last went on from it."""
        return self._uses[node].used_s

    def now_s(self) -> float:
        """By the clock of those times."""
        return self._clock()
