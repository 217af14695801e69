"""A request trace through the real index and the real eviction policy, without a model: how much would have been found.

One id of the trace is one token of the tree and stands for a block of 512. Three policies over the same requests:

- `kvstrata`: index, watch and eviction as the store uses them, trims included.
- `lru`: leaves first, the one that was used longest ago; it may trim by single blocks, which costs it nothing here.
- `optimal`: knows the future. Belady's rule over blocks, with the choice not to keep a block at all: of what is there
  and what was asked, drop what is asked for again last. Blocks are of one size, so no policy can find more. Where all
  requests count it is a policy from the leaves itself: what comes before a block is always asked for at least as soon.

What a reply adds is not in a trace's ids until the next turn asks for it, and is not stored here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from kvstrata.bench.trace import BLOCK_TOKENS, Asked, Trace
from kvstrata.errors import ConfigError
from kvstrata.index.tree import Node, Tree
from kvstrata.store.eviction import Eviction
from kvstrata.store.policy import PrefillCost
from kvstrata.store.shadow import AgeShadow
from kvstrata.store.uses import Uses
from kvstrata.store.watch import Watch

PolicyName = Literal["kvstrata", "lru", "optimal"]
POLICIES: tuple[PolicyName, ...] = ("kvstrata", "lru", "optimal")
ROOT = b"trace"
FULL_BITS = 16


@dataclass(frozen=True)
class Row:
    trace: str
    budget: float  # bytes, as a share of what all distinct blocks take at 16 bits
    policy: PolicyName
    bits: int
    hit_rate: float  # blocks found / blocks asked for
    budget_blocks: int  # how many blocks that holds at these bits
    num_requests: int  # that count

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Hits:
    num_found: int
    num_asked: int

    @property
    def rate(self) -> float:
        return self.num_found / max(1, self.num_asked)


class Replayed(Protocol):
    def serve(self, request: Asked) -> int:
        """Find, file, make room. Tells how many blocks were found."""
        ...


class StrataStore:
    """What the store does with its index and policy. A block counts as one byte: all are of one precision."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.tree: Tree[Asked] = Tree()
        self._watch = Watch(num_blocks)
        self._eviction: Eviction[Node[Asked]] = Eviction(self._watch.reuse, PrefillCost(), quantum_tokens=BLOCK_TOKENS)
        self._uses = Uses()

    def serve(self, request: Asked) -> int:
        now_s = request.time_s
        inserted = self.tree.insert(ROOT, request.blocks, request)
        kind = self._watch.asked(ROOT, request.blocks, now_s)
        self._uses.inserted(inserted, kind, now_s)
        for node in (*inserted.path[-2:], *inserted.halves):
            self._offer(node)
        while self.tree.num_tokens > self._num_blocks:
            self._evict(now_s)
        return inserted.num_matched

    def _evict(self, now_s: float) -> None:
        num_over = self.tree.num_tokens - self._num_blocks
        for leaf, keep_tokens in self._eviction.choose(num_over, now_s, by_age=self._watch.prefers_age):
            if keep_tokens:
                self.tree.trim(leaf, leaf.start + keep_tokens // BLOCK_TOKENS)
                self._offer(leaf)
            else:
                self.tree.remove(leaf)
                self._uses.forget(leaf)
                if leaf.parent is not None:
                    self._offer(leaf.parent)

    def _offer(self, node: Node[Asked]) -> None:
        if not node.is_leaf:
            self._eviction.discard(node)
            return
        use = self._uses[node]
        self._eviction.add(
            node,
            nbytes=node.num_tokens,
            start=node.start * BLOCK_TOKENS,
            num_tokens=node.num_tokens * BLOCK_TOKENS,
            used_s=use.used_s,
            kind=use.kind,
        )


class LruStore:
    def __init__(self, num_blocks: int) -> None:
        self._shadow = AgeShadow(num_blocks)

    def serve(self, request: Asked) -> int:
        return self._shadow.asked(ROOT, request.blocks, request.time_s)


def serve_all(trace: Trace, store: Replayed, count_from: int = 0) -> Hits:
    """Requests before `count_from` warm the store and do not count."""
    found = [store.serve(request) for request in trace.requests]
    return Hits(sum(found[count_from:]), sum(len(request.blocks) for request in trace.requests[count_from:]))


def serve_knowing_the_future(trace: Trace, num_blocks: int, count_from: int = 0) -> Hits:
    """`optimal`. A block that is asked for again before counting begins comes back for nothing: it may go first."""
    asked_next = _asked_next(trace, count_from)
    held: dict[int, tuple[float, int]] = {}
    farthest: list[tuple[float, int, int]] = []
    num_found = num_asked = 0
    for at, blocks in enumerate(trace.numbers):
        ids = blocks.tolist()
        if at >= count_from:
            num_found += sum(block in held for block in ids)
            num_asked += len(ids)
        for depth, (block, when) in enumerate(zip(ids, asked_next[at], strict=True)):
            held[block] = (-when, -depth)
            heapq.heappush(farthest, (-when, -depth, block))
        while len(held) > num_blocks:
            when, depth, block = heapq.heappop(farthest)
            if held.get(block) == (when, depth):
                del held[block]
    return Hits(num_found, num_asked)


def _asked_next(trace: Trace, count_from: int) -> list[list[float]]:
    """For each block of each request, which later request asks for it; infinite where none that counts does."""
    following: dict[int, int] = {}
    found: list[list[float]] = []
    for at in reversed(range(len(trace.numbers))):
        ids = trace.numbers[at].tolist()
        nexts = [following.get(block, -1) for block in ids]
        found.append([when if when >= count_from and when >= 0 else math.inf for when in nexts])
        following.update(dict.fromkeys(ids, at))
    return found[::-1]


def replay(
    trace: Trace,
    budgets: Sequence[float],
    bits: Sequence[int] = (16, 8, 4),
    *,
    policies: Sequence[PolicyName] = POLICIES,
    held_out: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """A row for each budget (a share of what all distinct blocks take at 16 bits), precision and policy. With
    `held_out` the first half of the requests warms the store and the second half counts."""
    count_from = len(trace.requests) // 2 if held_out else 0
    rates: dict[tuple[PolicyName, int], float] = {}  # the same number of blocks need not be replayed twice
    rows = []
    for budget in budgets:
        for each in bits:
            num_blocks = int(budget * trace.num_distinct * FULL_BITS / each)
            if num_blocks < 1:
                raise ConfigError(f"A budget of {budget:.3%} of '{trace.name}' holds not one block. Give more")
            for policy in policies:
                if (policy, num_blocks) not in rates:
                    progress(f"{trace.name}: {policy}, {num_blocks} blocks")
                    rates[policy, num_blocks] = _hits(trace, policy, num_blocks, count_from).rate
                rate = rates[policy, num_blocks]
                rows.append(Row(trace.name, budget, policy, each, rate, num_blocks, len(trace.requests) - count_from))
    return rows


def _hits(trace: Trace, policy: PolicyName, num_blocks: int, count_from: int) -> Hits:
    if policy == "optimal":
        return serve_knowing_the_future(trace, num_blocks, count_from)
    store = StrataStore(num_blocks) if policy == "kvstrata" else LruStore(num_blocks)
    return serve_all(trace, store, count_from)
