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


class TimeQueue(Generic[K]):
    """Keys by time of use, with access to the oldest and the newest, in O(log n) for each operation.

    Two heaps hold items (time, start, version, key). Each `put` makes another item; only the one with the latest
    version of its key counts, and the others are skipped when they reach the top. The heap for the newest, with all
    numbers negated, exists from the first call of `newest` on.
    """

    def __init__(self) -> None:
        self._versions: dict[K, int] = {}  # latest version of each key
        self._oldest: list[tuple[float, int, int, K]] = []
        self._newest: list[tuple[float, int, int, K]] | None = None
        self._last_version = 0

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, key: K) -> bool:
        return key in self._versions

    def put(self, key: K, used_s: float, start: int) -> None:
        """Add a key or update its time. Of two keys with the same time, the one with the later start is older."""
        self._last_version += 1
        self._versions[key] = self._last_version
        heapq.heappush(self._oldest, (used_s, -start, self._last_version, key))
        max_items = 64 + 4 * len(self._versions)
        if len(self._oldest) > max_items:
            self._oldest = self._without_outdated(self._oldest, 1)
        if self._newest is not None:
            heapq.heappush(self._newest, (-used_s, start, -self._last_version, key))
            if len(self._newest) > max_items:
                self._newest = self._without_outdated(self._newest, -1)

    def discard(self, key: K) -> None:
        self._versions.pop(key, None)

    def oldest(self) -> K | None:
        return self._first(self._oldest, 1)

    def newest(self) -> K | None:
        if self._newest is None:
            current = self._without_outdated(self._oldest, 1)
            self._newest = [(-used_s, -start, -version, key) for used_s, start, version, key in current]
            heapq.heapify(self._newest)
        return self._first(self._newest, -1)

    def _first(self, heap: list[tuple[float, int, int, K]], sign: int) -> K | None:
        while heap:
            _, _, version, key = heap[0]
            if self._versions.get(key) == sign * version:
                return key
            heapq.heappop(heap)
        return None

    def _without_outdated(self, heap: list[tuple[float, int, int, K]], sign: int) -> list[tuple[float, int, int, K]]:
        valid = [item for item in heap if self._versions.get(item[3]) == sign * item[2]]
        heapq.heapify(valid)
        return valid


# reuse class, cost per byte in steps of half an octave, is_archived, is_superseded
QueueKey = tuple[ReuseClass, int, bool, bool]

# A leaf other than the oldest is chosen only if its worth is below this share of the oldest leaf's. Without the share,
# noise of the estimates cost up to 0.006 of hit rate where LRU is near the optimum; at 0.7 a third of the gain over LRU
# elsewhere is lost.
CLEARLY = 0.9

# Share of a leaf's cost that remains when the disk has a copy: the leaf is read, not computed. Reading a token from a
# disk takes a hundredth of the time of computing it on a CPU, and about the time of a small model on a fast GPU.
ARCHIVED_COST_SHARE = 0.1


class Chosen(NamedTuple, Generic[K]):
    """A leaf chosen for eviction, in whole or in part."""

    leaf: K
    keep_tokens: int  # tokens at its start that stay; 0: evict all of it


class LeafValue(NamedTuple):
    """Properties of an evictable leaf that determine its worth."""

    nbytes: int
    start: int
    num_tokens: int
    used_s: float
    reuse_class: ReuseClass = ReuseClass.FRESH
    expires_s: float = math.inf
    is_archived: bool = False  # the disk has a copy
    is_superseded: bool = False  # its conversation continued on another branch: worth nothing


class _Candidate(NamedTuple):
    """An evictable leaf, its cost per byte, and the queue that it is in."""

    value: LeafValue
    byte_cost: float
    queue_key: QueueKey


class EvictionOrder(Generic[K]):
    """Evictable leaves in the order of their worth.

    Leaves of the same reuse class, cost and flags share a queue, in which worth depends on age alone. The leaf with the
    least worth is therefore at an end of a queue, and a choice costs the same for any number of leaves.
    """

    def __init__(self, reuse: Reuse, cost: PrefillCost, quantum_tokens: int) -> None:
        self._reuse = reuse
        self._cost = cost
        self._quantum_tokens = quantum_tokens  # a trimmed leaf keeps a multiple of this
        self._leaves: dict[K, _Candidate] = {}
        self._queues: dict[QueueKey, TimeQueue[K]] = {}
        self._expiring: TimeQueue[K] = TimeQueue()

    def __len__(self) -> int:
        return len(self._leaves)

    def add(self, key: K, leaf: LeafValue) -> None:
        """Add a leaf that is neither leased nor pinned, or update one that was used or changed its size."""
        self.discard(key)
        byte_cost = self._cost.per_token(leaf.start + leaf.num_tokens / 2) * leaf.num_tokens / max(1, leaf.nbytes)
        byte_cost *= ARCHIVED_COST_SHARE if leaf.is_archived else 1.0
        queue_key = leaf.reuse_class, math.floor(2 * math.log2(byte_cost)), leaf.is_archived, leaf.is_superseded
        self._leaves[key] = _Candidate(leaf, byte_cost, queue_key)
        self._queues.setdefault(queue_key, TimeQueue()).put(key, leaf.used_s, leaf.start)
        if leaf.expires_s < math.inf:
            self._expiring.put(key, leaf.expires_s, leaf.start)

    def discard(self, leaf: K) -> None:
        """Remove a leaf that is in use, pinned, evicted or no longer a leaf. Unknown leaves are ignored."""
        candidate = self._leaves.pop(leaf, None)
        if candidate is None:
            return
        self._expiring.discard(leaf)
        queue = self._queues[candidate.queue_key]
        queue.discard(leaf)
        if not len(queue):
            del self._queues[candidate.queue_key]

    def choose(self, need_bytes: int, now_s: float, *, spare_only: bool = False) -> list[Chosen[K]]:
        """Remove and return the leaves to evict now: all expired ones, else the leaf with the least worth.

        The list is empty when no leaf is expired, and no memory is needed or no leaf is left. Without expired leaves it
        has a single leaf, because the node above becomes the next candidate. The caller adds again a leaf that stays,
        in whole or in part. With `spare_only`, only leaves that the disk has too or that are superseded are chosen for
        memory.
        """
        chosen = [Chosen(leaf, 0) for leaf in self._take_expired(now_s)]
        least = self._least_worth(now_s, spare_only) if need_bytes > 0 and not chosen else None
        if least is not None:
            value = self._leaves[least].value
            need_tokens = math.ceil(need_bytes * value.num_tokens / max(1, value.nbytes))
            self.discard(least)
            chosen.append(Chosen(least, kept_tokens(value.num_tokens, need_tokens, self._quantum_tokens)))
        return chosen

    def next_expiry_s(self) -> float:
        """Return the time at which the next leaf expires; infinite if none will."""
        leaf = self._expiring.oldest()
        return math.inf if leaf is None else self._leaves[leaf].value.expires_s

    def worth(self, leaf: K, now_s: float) -> float:
        """Return the cost that keeping a leaf saves, per byte and second."""
        (value, byte_cost, _) = self._leaves[leaf]
        if value.is_superseded:
            return 0.0
        return self._reuse.density(value.reuse_class, now_s - value.used_s) * byte_cost

    def _take_expired(self, now_s: float) -> list[K]:
        expired = []
        while (leaf := self._expiring.oldest()) is not None and self._leaves[leaf].value.expires_s <= now_s:
            self.discard(leaf)
            expired.append(leaf)
        return expired

    def _least_worth(self, now_s: float, spare_only: bool) -> K | None:
        keys = [key for key in self._queues if not spare_only or key[2] or key[3]]
        keys = [key for key in keys if key[3]] or keys  # superseded leaves come before all others
        queues = [self._queues[key] for key in keys]
        ends = [leaf for queue in queues if (leaf := queue.oldest()) is not None]
        oldest = min(ends, key=lambda leaf: self._leaves[leaf].value.used_s, default=None)
        if oldest is None:
            return None
        ends += [leaf for queue in queues if (leaf := queue.newest()) is not None]
        least, least_worth = oldest, (CLEARLY * self.worth(oldest, now_s), -math.inf)
        for leaf in ends:
            worth = self.worth(leaf, now_s), self._leaves[leaf].value.used_s
            if worth < least_worth:
                least, least_worth = leaf, worth
        return least


class Use(NamedTuple):
    """Last use of a node."""

    used_s: float
    reuse_class: ReuseClass
    session: str = ""  # the only session that ever used the node; empty: none or several


class UseRecords:
    """Last use of each node."""

    def __init__(self) -> None:
        self._last: dict[Node[Any], Use] = {}

    def __getitem__(self, node: Node[Any]) -> Use:
        return self._last[node]

    def record_use(self, path: Sequence[Node[Any]], reuse_class: ReuseClass, now_s: float, session: str = "") -> None:
        """Record that a request used these nodes."""
        use, shared = Use(now_s, reuse_class, session), Use(now_s, reuse_class)
        for node in path:
            before = self._last.get(node)
            self._last[node] = use if before is None or before.session == session else shared

    def record_insert(self, inserted: Inserted[Any], reuse_class: ReuseClass, now_s: float, session: str = "") -> None:
        """Record that a request inserted its tokens. It did not use the lower half of a split node."""
        if inserted.halves:
            self.record_split(*inserted.halves)
        self.record_use(inserted.path, reuse_class, now_s, session)

    def record_split(self, upper: Node[Any], lower: Node[Any]) -> None:
        """Record that a node was split because a request uses its upper half alone."""
        before = self._last[lower]
        self._last[upper] = before
        self._last[lower] = before._replace(reuse_class=before.reuse_class.left)

    def record_merge(self, upper: Node[Any], lower: Node[Any]) -> None:
        """Record that the lower node now has the tokens of both."""
        above, below = self._last.pop(upper), self._last[lower]
        if above.session != below.session:
            self._last[lower] = below._replace(session="")

    def forget_node(self, node: Node[Any]) -> None:
        """Drop the record of a removed node."""
        self._last.pop(node, None)


# The history remembers this many times the tokens that the cache can hold. It learns nothing from later returns.
HISTORY_FACTOR = 8


class LastUse(NamedTuple):
    """Last use of a node of the history, and the observation of its next use."""

    awaited: AwaitedUse
    reuse_class: ReuseClass
    used_s: float


def reuse_class_of(known_tokens: int, num_tokens: int) -> ReuseClass:
    """Return the reuse class of a request of which `known_tokens` prompt tokens were requested before."""
    return ReuseClass.CONTINUED if 2 * known_tokens >= num_tokens else ReuseClass.FRESH


class RequestHistory:
    """Past prompts, cached or not, from which `reuse` learns.

    `cache_tokens` returns about how many tokens the cache can hold now; it bounds the history.
    """

    def __init__(self, reuse: Reuse, cache_tokens: Callable[[], int]) -> None:
        self._reuse = reuse
        self._cache_tokens = cache_tokens
        self._tree: RadixTree[LastUse | None] = RadixTree()
        self._leaves: TimeQueue[Node[LastUse | None]] = TimeQueue()

    @property
    def num_tokens(self) -> int:
        return self._tree.num_tokens

    def known_tokens(self, root_key: bytes, tokens: Tokens) -> int:
        """Return how many tokens of a prompt earlier prompts had in common with it."""
        return self._tree.match(root_key, tokens).num_tokens

    def record_request(self, root_key: bytes, tokens: Tokens, now_s: float) -> ReuseClass:
        """Remember a prompt. Return the reuse class of the nodes that it uses."""
        ids = as_ids(tokens)
        inserted = self._tree.insert(root_key, ids, None)
        reuse_class = reuse_class_of(inserted.num_matched, len(ids))
        self._record_split(inserted)
        for node in inserted.path:
            self._record_use(node, min(node.end, len(ids)) - node.start, reuse_class, now_s)
            self._leaves.discard(node)
        if inserted.path and inserted.path[-1].is_leaf:
            self._queue_leaf(inserted.path[-1])
        max_tokens = HISTORY_FACTOR * self._cache_tokens()
        while self._tree.num_tokens > max_tokens:
            self._forget_oldest(now_s)
        return reuse_class

    def _record_split(self, inserted: Inserted[LastUse | None]) -> None:
        """Let the upper half keep the observation, and begin one of another class for the unused lower half."""
        if not inserted.halves:
            return
        _, lower = inserted.halves
        seen = lower.payload
        assert seen is not None
        reuse_class = seen.reuse_class.left
        awaited = self._reuse.opened(reuse_class, lower.num_tokens, seen.used_s)
        lower.payload = LastUse(awaited, reuse_class, seen.used_s)
        if lower.is_leaf:
            self._queue_leaf(lower)

    def _record_use(self, node: Node[LastUse | None], num_tokens: int, reuse_class: ReuseClass, now_s: float) -> None:
        if node.payload is not None:
            self._reuse.reused(node.payload.awaited, num_tokens, now_s)
        node.payload = LastUse(self._reuse.opened(reuse_class, node.num_tokens, now_s), reuse_class, now_s)

    def _queue_leaf(self, leaf: Node[LastUse | None]) -> None:
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
            self._queue_leaf(leaf.parent)
