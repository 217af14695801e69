"""Which leaf goes next. Holds the leaves that may go, in queues of like worth; O(log n) for each operation.

Inside a queue only the age differs, and a kind is worth most around the age at which it comes back, less before and
after. So the least one is at one of the two ends, and only those are looked at. Knows no tree and no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from kvstrata.eviction.leaf_queue import LeafQueue
from kvstrata.eviction.worth import Kind, PrefillCost, Reuse, kept_tokens

K = TypeVar("K", bound=Hashable)
# kind, cost by byte in steps of half an octave, whether the disk has it too, whether it is superseded
QueueKey = tuple[Kind, int, bool, bool]

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


class Leaf(NamedTuple):
    """What is known of a leaf that may go."""

    nbytes: int
    start: int
    num_tokens: int
    used_s: float
    kind: Kind = Kind.FRESH
    expires_s: float = math.inf
    is_spare: bool = False  # the disk has it too
    is_superseded: bool = False  # its conversation has gone on elsewhere: it is worth nothing


class _Placed(NamedTuple):
    leaf: Leaf
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

    def add(self, key: K, leaf: Leaf) -> None:
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
