"""Eviction order, last uses, and the request history that reuse is learnt from. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from kvstrata.prefix_cache.keys import Tokens, as_ids
from kvstrata.prefix_cache.radix_tree import Inserted, Node, RadixTree
from kvstrata.prefix_cache.worth import AwaitedUse, PrefillCost, Reuse, ReuseClass, kept_tokens

K = TypeVar("K", bound=Hashable)


class LeafQueue(Generic[K]):
    """O(log n) for each operation: two heaps whose outdated items are skipped when they come up. The one for the newest
    is kept from the first call of `newest` on."""

    def __init__(self) -> None:
        self._current: dict[K, int] = {}  # the number of the item that counts
        self._oldest: list[tuple[float, int, int, K]] = []
        self._newest: list[tuple[float, int, int, K]] | None = None
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: K) -> bool:
        return key in self._current

    def put(self, key: K, used_s: float, start: int) -> None:
        """Also for a key that is there already. Of two with the same time, the one that starts later is the older."""
        self._num_put += 1
        self._current[key] = self._num_put
        heapq.heappush(self._oldest, (used_s, -start, self._num_put, key))
        most = 64 + 4 * len(self._current)
        if len(self._oldest) > most:
            self._oldest = self._without_outdated(self._oldest, 1)
        if self._newest is not None:
            heapq.heappush(self._newest, (-used_s, start, -self._num_put, key))
            if len(self._newest) > most:
                self._newest = self._without_outdated(self._newest, -1)

    def discard(self, key: K) -> None:
        self._current.pop(key, None)

    def oldest(self) -> K | None:
        return self._first(self._oldest, 1)

    def newest(self) -> K | None:
        if self._newest is None:
            current = self._without_outdated(self._oldest, 1)
            self._newest = [(-used_s, -start, -number, key) for used_s, start, number, key in current]
            heapq.heapify(self._newest)
        return self._first(self._newest, -1)

    def _first(self, heap: list[tuple[float, int, int, K]], sign: int) -> K | None:
        current = self._current
        while heap:
            _, _, number, key = heap[0]
            if current.get(key) == sign * number:
                return key
            heapq.heappop(heap)
        return None

    def _without_outdated(self, heap: list[tuple[float, int, int, K]], sign: int) -> list[tuple[float, int, int, K]]:
        kept = [item for item in heap if self._current.get(item[3]) == sign * item[2]]
        heapq.heapify(kept)
        return kept


# kind, cost by byte in steps of half an octave, whether the disk has it too, whether it is superseded
QueueKey = tuple[ReuseClass, int, bool, bool]

# Another leaf than the oldest goes only where it is worth less than this share of it. Without it the noise of the
# estimates cost up to 0.006 of hit rate where LRU is near the optimum; at 0.7 a third of what is won elsewhere is lost.
CLEARLY = 0.9

# What a copy on the disk leaves of a leaf's cost: it is read, not computed. A disk reads a token in a hundredth of the
# time in which a model on a CPU computes it, and in about the same time as a small model on a fast GPU.
SPARE_SHARE = 0.1


class Chosen(NamedTuple, Generic[K]):
    """A leaf that goes, or its end."""

    leaf: K
    keep_tokens: int  # from its start on; 0: all of it goes


class LeafValue(NamedTuple):
    """What is known of a leaf that may go."""

    nbytes: int
    start: int
    num_tokens: int
    used_s: float
    kind: ReuseClass = ReuseClass.FRESH
    expires_s: float = math.inf
    is_spare: bool = False  # the disk has it too
    is_superseded: bool = False  # its conversation has gone on elsewhere: it is worth nothing


class _Placed(NamedTuple):
    leaf: LeafValue
    cost_by_byte: float
    queue: QueueKey


class EvictionOrder(Generic[K]):
    def __init__(self, reuse: Reuse, cost: PrefillCost, quantum_tokens: int) -> None:
        self._reuse = reuse
        self._cost = cost
        self._quantum_tokens = quantum_tokens  # what stays of a leaf is a multiple of this
        self._leaves: dict[K, _Placed] = {}
        self._queues: dict[QueueKey, LeafQueue[K]] = {}
        self._expiring: LeafQueue[K] = LeafQueue()

    def __len__(self) -> int:
        return len(self._leaves)

    def add(self, key: K, leaf: LeafValue) -> None:
        """A leaf that may go: neither leased nor pinned. Again where it was used or changed its size."""
        self.discard(key)
        cost_by_byte = self._cost.per_token(leaf.start + leaf.num_tokens / 2) * leaf.num_tokens / max(1, leaf.nbytes)
        cost_by_byte *= SPARE_SHARE if leaf.is_spare else 1.0
        queue = leaf.kind, math.floor(2 * math.log2(cost_by_byte)), leaf.is_spare, leaf.is_superseded
        self._leaves[key] = _Placed(leaf, cost_by_byte, queue)
        self._queues.setdefault(queue, LeafQueue()).put(key, leaf.used_s, leaf.start)
        if leaf.expires_s < math.inf:
            self._expiring.put(key, leaf.expires_s, leaf.start)

    def discard(self, leaf: K) -> None:
        """It is in use, pinned, gone, or not a leaf any more. Nothing happens where it is not known."""
        known = self._leaves.pop(leaf, None)
        if known is None:
            return
        self._expiring.discard(leaf)
        queue = self._queues[known.queue]
        queue.discard(leaf)
        if not len(queue):
            del self._queues[known.queue]

    def choose(self, need_bytes: int, now_s: float, *, spare_only: bool = False) -> list[Chosen[K]]:
        """What has expired; else, where room is needed, the one leaf that is worth least, or its end. One at a time:
        the node above it becomes the next candidate. Empty when there is none. Chosen leaves are no candidates any
        more: one that stays, or a part of it, is added again. `spare_only`: of those that the disk has too, or that are
        superseded."""
        chosen = [Chosen(leaf, 0) for leaf in self._take_expired(now_s)]
        least = self._least(now_s, spare_only) if need_bytes > 0 and not chosen else None
        if least is not None:
            known = self._leaves[least].leaf
            need_tokens = math.ceil(need_bytes * known.num_tokens / max(1, known.nbytes))
            self.discard(least)
            chosen.append(Chosen(least, kept_tokens(known.num_tokens, need_tokens, self._quantum_tokens)))
        return chosen

    def next_expiry_s(self) -> float:
        """When the first leaf expires; infinite where none will."""
        leaf = self._expiring.oldest()
        return math.inf if leaf is None else self._leaves[leaf].leaf.expires_s

    def worth(self, leaf: K, now_s: float) -> float:
        """Cost that keeping it saves, for each byte and second."""
        (known, cost_by_byte, _) = self._leaves[leaf]
        if known.is_superseded:
            return 0.0
        return self._reuse.density(known.kind, now_s - known.used_s) * cost_by_byte

    def _take_expired(self, now_s: float) -> list[K]:
        expired = []
        while (leaf := self._expiring.oldest()) is not None and self._leaves[leaf].leaf.expires_s <= now_s:
            self.discard(leaf)
            expired.append(leaf)
        return expired

    def _least(self, now_s: float, spare_only: bool) -> K | None:
        keys = [key for key in self._queues if not spare_only or key[2] or key[3]]
        keys = [key for key in keys if key[3]] or keys  # what is superseded goes before anything else
        queues = [self._queues[key] for key in keys]
        ends = [leaf for queue in queues if (leaf := queue.oldest()) is not None]
        oldest = min(ends, key=lambda leaf: self._leaves[leaf].leaf.used_s, default=None)
        if oldest is None:
            return None
        ends += [leaf for queue in queues if (leaf := queue.newest()) is not None]
        least, most = oldest, (CLEARLY * self.worth(oldest, now_s), -math.inf)
        for leaf in ends:
            worth = self.worth(leaf, now_s), self._leaves[leaf].leaf.used_s
            if worth < most:
                least, most = leaf, worth
        return least


class Use(NamedTuple):
    used_s: float
    kind: ReuseClass
    session: str = ""  # the only one that ever used it; empty: none, or several


class UseRecords:
    def __init__(self) -> None:
        self._last: dict[Node[Any], Use] = {}

    def __getitem__(self, node: Node[Any]) -> Use:
        return self._last[node]

    def touch(self, path: Sequence[Node[Any]], kind: ReuseClass, now_s: float, session: str = "") -> None:
        """A request used these nodes."""
        use, shared = Use(now_s, kind, session), Use(now_s, kind)
        for node in path:
            before = self._last.get(node)
            self._last[node] = use if before is None or before.session == session else shared

    def inserted(self, inserted: Inserted[Any], kind: ReuseClass, now_s: float, session: str = "") -> None:
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


# How many times as long as the store can hold prompts they are remembered: what returns later is not learned from.
HISTORY_FACTOR = 8


class Seen(NamedTuple):
    """The last use of a node."""

    awaited: AwaitedUse
    kind: ReuseClass
    used_s: float


def reuse_class_of(known_tokens: int, num_tokens: int) -> ReuseClass:
    """Of a request, by how much of its prompt was asked for before."""
    return ReuseClass.CONTINUED if 2 * known_tokens >= num_tokens else ReuseClass.FRESH


class RequestHistory:
    """`store_tokens` tells about how many the store can hold now."""

    def __init__(self, reuse: Reuse, store_tokens: Callable[[], int]) -> None:
        self._reuse = reuse
        self._store_tokens = store_tokens
        self._tree: RadixTree[Seen | None] = RadixTree()
        self._leaves: LeafQueue[Node[Seen | None]] = LeafQueue()

    @property
    def num_tokens(self) -> int:
        return self._tree.num_tokens

    def known_tokens(self, root_key: bytes, tokens: Tokens) -> int:
        """How far a prompt was asked for before, by whatever prompt."""
        return self._tree.match(root_key, tokens).num_tokens

    def record_request(self, root_key: bytes, tokens: Tokens, now_s: float) -> ReuseClass:
        """Remember a prompt. Says of which kind the nodes are that it uses."""
        wanted = as_ids(tokens)
        inserted = self._tree.insert(root_key, wanted, None)
        kind = reuse_class_of(inserted.num_matched, len(wanted))
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

    def _use(self, node: Node[Seen | None], num_tokens: int, kind: ReuseClass, now_s: float) -> None:
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
