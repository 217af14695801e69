"""Replay of a request trace through the real index and eviction policy, without a model, to find the hit rate.

An id of the trace is one token of the tree and stands for a block of 512 tokens. Three policies serve the requests:

- `kvstrata`: index, history and eviction as in the prefix cache, trims included.
- `lru`: evicts the least recently used leaf (`LruPolicy`).
- `optimal`: knows the future. Belady's rule over blocks, with the choice not to keep a block at all: of the cached
  and the requested blocks, drop the one that is requested again last. Blocks have one size, so no policy can find more.
  If all requests count, it evicts leaves only: a prefix is always requested again at least as soon as its extension.

A trace shows the tokens of a reply only when the next turn requests them, so replies are not cached here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from kvstrata.bench.figures import Figure, Progress, lay_out, silent
from kvstrata.bench.trace import BLOCK_TOKENS, ReplayRequest, ReplayTrace
from kvstrata.errors import ConfigError
from kvstrata.prefix_cache.eviction_order import EvictionOrder, LeafValue, RequestHistory, TimeQueue, UseRecords
from kvstrata.prefix_cache.radix_tree import Node, RadixTree
from kvstrata.prefix_cache.worth import PrefillCost, Reuse

PolicyName = Literal["kvstrata", "lru", "optimal"]

POLICIES: tuple[PolicyName, ...] = ("kvstrata", "lru", "optimal")

ROOT = b"trace"
FULL_BITS = 16


@dataclass(frozen=True)
class ReplayRow(Figure):
    trace: str
    budget: float  # bytes, as a share of what all distinct blocks take at 16 bits
    policy: PolicyName
    bits: int
    hit_rate: float  # blocks found / blocks asked for
    budget_blocks: int  # how many blocks that holds at these bits
    num_requests: int  # counted ones
    above_lru: float | None = None  # hit rate of `kvstrata` less that of `lru`, if both ran
    above_lru_error: float | None = None  # the standard error of that difference


@dataclass(frozen=True)
class ReplayHits:
    """Requested and found blocks of each counted request."""

    found: tuple[int, ...]
    asked: tuple[int, ...]

    @property
    def num_found(self) -> int:
        return sum(self.found)

    @property
    def num_asked(self) -> int:
        return sum(self.asked)

    @property
    def rate(self) -> float:
        return self.num_found / max(1, self.num_asked)


@dataclass(frozen=True)
class Difference:
    rate: float
    standard_error: float


def difference(first: ReplayHits, second: ReplayHits) -> Difference:
    """Return how much higher the first hit rate is, with its standard error.

    Both served the same requests, so the error is that of the pairs: the deviation of each request's difference from
    the mean difference.
    """
    found = np.subtract(first.found, second.found).astype(np.float64)
    asked = np.array(first.asked, dtype=np.float64)
    rate = found.sum() / max(1.0, asked.sum())
    squares = np.square(found - rate * asked).sum() * len(found) / max(1, len(found) - 1)
    return Difference(float(rate), float(np.sqrt(squares) / max(1.0, asked.sum())))


class ReplayPolicy(Protocol):
    """Cache of blocks with an eviction policy."""

    def serve(self, request: ReplayRequest) -> int:
        """Look up a request, insert it and evict to the limit. Return the number of blocks found."""
        ...


class KvstrataPolicy:
    """The prefix cache's index and eviction policy. A block counts as one byte, because all have the same precision.
    `evicted` is called with the ids of evicted blocks."""

    def __init__(self, num_blocks: int, evicted: Callable[[list[int]], object] = lambda _: None) -> None:
        self._num_blocks = num_blocks
        self._evicted = evicted
        self.tree: RadixTree[ReplayRequest] = RadixTree()
        reuse = Reuse()
        self._history = RequestHistory(reuse, lambda: num_blocks)
        self._eviction: EvictionOrder[Node[ReplayRequest]] = EvictionOrder(
            reuse, PrefillCost(), quantum_tokens=BLOCK_TOKENS
        )
        self._uses = UseRecords()

    def serve(self, request: ReplayRequest) -> int:
        now_s = request.time_s
        inserted = self.tree.insert(ROOT, request.blocks, request)
        kind = self._history.record_request(ROOT, request.blocks, now_s)
        self._uses.record_insert(inserted, kind, now_s)
        for node in (*inserted.path[-2:], *inserted.halves):
            self._offer(node)
        while self.tree.num_tokens > self._num_blocks:
            self._evict(now_s)
        return inserted.num_matched

    def _evict(self, now_s: float) -> None:
        num_over = self.tree.num_tokens - self._num_blocks
        for leaf, keep_tokens in self._eviction.choose(num_over, now_s):
            self._evicted(leaf.tokens[keep_tokens // BLOCK_TOKENS :].tolist())
            if keep_tokens:
                self.tree.trim(leaf, leaf.start + keep_tokens // BLOCK_TOKENS)
                self._offer(leaf)
            else:
                self.tree.remove(leaf)
                self._uses.forget_node(leaf)
                if leaf.parent is not None:
                    self._offer(leaf.parent)

    def _offer(self, node: Node[ReplayRequest]) -> None:
        if not node.is_leaf:
            self._eviction.discard(node)
            return
        use = self._uses[node]
        nbytes, start, num_tokens = node.num_tokens, node.start * BLOCK_TOKENS, node.num_tokens * BLOCK_TOKENS
        self._eviction.add(node, LeafValue(nbytes, start, num_tokens, use.used_s, use.reuse_class))


class LruPolicy:
    """Eviction of the least recently used leaf."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._tree: RadixTree[None] = RadixTree()
        self._leaves: TimeQueue[Node[None]] = TimeQueue()
        self._used_s: dict[Node[None], float] = {}

    def serve(self, request: ReplayRequest) -> int:
        inserted = self._tree.insert(ROOT, request.blocks, None)
        if inserted.halves:
            upper, lower = inserted.halves
            self._used_s[upper] = self._used_s[lower]
        for node in inserted.path:
            self._used_s[node] = request.time_s
            self._leaves.discard(node)
        for node in (*inserted.path[-1:], *inserted.halves):
            self._offer(node)
        while self._tree.num_tokens > self._num_blocks:
            self._evict(self._tree.num_tokens - self._num_blocks)
        return inserted.num_matched

    def _evict(self, num_over: int) -> None:
        leaf = self._leaves.oldest()
        assert leaf is not None
        if num_over < leaf.num_tokens:
            self._tree.trim(leaf, leaf.end - num_over)
            return
        self._leaves.discard(leaf)
        self._tree.remove(leaf)
        del self._used_s[leaf]
        if leaf.parent is not None:
            self._offer(leaf.parent)

    def _offer(self, node: Node[None]) -> None:
        if node.is_leaf:
            self._leaves.put(node, self._used_s[node], node.start)


def serve_all(trace: ReplayTrace, policy: ReplayPolicy, count_from: int = 0) -> ReplayHits:
    """Serve a trace. Requests before `count_from` warm the cache and do not count."""
    found = [policy.serve(request) for request in trace.requests]
    return ReplayHits(tuple(found[count_from:]), tuple(len(request.blocks) for request in trace.requests[count_from:]))


def serve_knowing_the_future(trace: ReplayTrace, num_blocks: int, count_from: int = 0) -> ReplayHits:
    """Serve a trace with the `optimal` policy. A hit before counting begins has no value, so such a block may go
    first."""
    asked_next = _asked_next(trace, count_from)
    held: dict[int, tuple[float, int]] = {}
    farthest: list[tuple[float, int, int]] = []
    found, asked = list[int](), list[int]()
    for at, blocks in enumerate(trace.numbers):
        ids = blocks.tolist()
        if at >= count_from:
            found.append(sum(block in held for block in ids))
            asked.append(len(ids))
        for depth, (block, when) in enumerate(zip(ids, asked_next[at], strict=True)):
            held[block] = (-when, -depth)
            heapq.heappush(farthest, (-when, -depth, block))
        while len(held) > num_blocks:
            when, depth, block = heapq.heappop(farthest)
            if held.get(block) == (when, depth):
                del held[block]
    return ReplayHits(tuple(found), tuple(asked))


def _asked_next(trace: ReplayTrace, count_from: int) -> list[list[float]]:
    """Return, for each block of each request, the next counted request for it, or infinity if there is none."""
    following: dict[int, int] = {}
    found: list[list[float]] = []
    for at in reversed(range(len(trace.numbers))):
        ids = trace.numbers[at].tolist()
        nexts = [following.get(block, -1) for block in ids]
        found.append([when if when >= count_from and when >= 0 else math.inf for when in nexts])
        following.update(dict.fromkeys(ids, at))
    return found[::-1]


def replay(
    trace: ReplayTrace,
    budgets: Sequence[float],
    bits: Sequence[int] = (16, 8, 4),
    *,
    policies: Sequence[PolicyName] = POLICIES,
    held_out: bool = False,
    progress: Progress = silent,
) -> list[ReplayRow]:
    """Return a row for each budget (a share of all distinct blocks at 16 bits), precision and policy.

    With `held_out` the first half of the requests warms the cache and the second half counts.
    """
    count_from = len(trace.requests) // 2 if held_out else 0
    hits: dict[tuple[PolicyName, int], ReplayHits] = {}  # the same number of blocks need not be replayed twice
    rows = []
    for budget in budgets:
        for each in bits:
            num_blocks = int(budget * trace.num_distinct * FULL_BITS / each)
            if num_blocks < 1:
                raise ConfigError(f"A budget of {budget:.3%} of '{trace.name}' holds not one block. Give more")
            for policy in policies:
                if (policy, num_blocks) not in hits:
                    progress(f"{trace.name}: {policy}, {num_blocks} blocks")
                    hits[policy, num_blocks] = _hits(trace, policy, num_blocks, count_from)
            found: dict[PolicyName, ReplayHits] = {policy: hits[policy, num_blocks] for policy in policies}
            rows += [_row(trace.name, budget, each, num_blocks, policy, found) for policy in policies]
    return rows


def table(rows: Sequence[ReplayRow]) -> str:
    """Return a table with a line for each budget and precision and a column for each policy."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    lines = [rows[at : at + len(policies)] for at in range(0, len(rows), len(policies))]
    return lay_out(
        lines,
        [
            ("trace", "<22", lambda line: line[0].trace),
            ("budget", ">8.2%", lambda line: line[0].budget),
            ("bits", ">6", lambda line: line[0].bits),
            ("blocks", ">9", lambda line: line[0].budget_blocks),
            *((policy, ">10.4f", lambda line, at=at: line[at].hit_rate) for at, policy in enumerate(policies)),
            *([("above lru", ">20", _above_lru)] if {"kvstrata", "lru"} <= set(policies) else []),
        ],
    )


def _above_lru(line: Sequence[ReplayRow]) -> str:
    return "".join(f"{row.above_lru:+.4f} ±{row.above_lru_error:.4f}" for row in line if row.above_lru is not None)


def _row(
    trace: str, budget: float, bits: int, num_blocks: int, policy: PolicyName, found: Mapping[PolicyName, ReplayHits]
) -> ReplayRow:
    hits = found[policy]
    row = ReplayRow(trace, budget, policy, bits, hits.rate, num_blocks, len(hits.asked))
    if policy != "kvstrata" or "lru" not in found:
        return row
    above = difference(hits, found["lru"])
    return replace(row, above_lru=above.rate, above_lru_error=above.standard_error)


def _hits(trace: ReplayTrace, policy: PolicyName, num_blocks: int, count_from: int) -> ReplayHits:
    if policy == "optimal":
        return serve_knowing_the_future(trace, num_blocks, count_from)
    served = KvstrataPolicy(num_blocks) if policy == "kvstrata" else LruPolicy(num_blocks)
    return serve_all(trace, served, count_from)
