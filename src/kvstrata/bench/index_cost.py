"""What one operation of the index and of the eviction policy costs, with few entries and with many.

Prompts of 64 tokens, half of them one of 64 shared beginnings, so that each adds one node. Medians, in microseconds.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from kvstrata.bench.driver import Figure, Progress, lay_out, seconds, silent
from kvstrata.prefix_cache.eviction_order import EvictionOrder, LeafValue
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.radix_tree import Node, RadixTree
from kvstrata.prefix_cache.worth import PrefillCost, Reuse, ReuseClass

ROOT = b"cost"
SHARED_TOKENS = 32
OWN_TOKENS = 32
NUM_SHARED = 64
SAMPLES = 2000
LONG_TOKENS = 100_000
TOKEN_BYTES = 1000


@dataclass(frozen=True)
class IndexCost(Figure):
    num_nodes: int
    match_us: float
    insert_us: float
    add_us: float  # a leaf to the eviction policy, as after each use
    evict_us: float  # choose, remove from the tree
    long_match_us: float  # a prompt of 100k tokens
    long_insert_us: float
    node_bytes: float  # what the tree takes for each, tokens included


def measure(sizes: Sequence[int], progress: Progress = silent) -> list[IndexCost]:
    rows = []
    for size in sizes:
        progress(f"{size} nodes")
        rows.append(_measure(size))
    return rows


def table(rows: Sequence[IndexCost]) -> str:
    return lay_out(
        rows,
        [
            ("nodes", ">9", lambda row: row.num_nodes),
            ("match", ">9.1f", lambda row: row.match_us),
            ("insert", ">9.1f", lambda row: row.insert_us),
            ("add", ">9.1f", lambda row: row.add_us),
            ("evict", ">9.1f", lambda row: row.evict_us),
            ("match 100k", ">12.1f", lambda row: row.long_match_us),
            ("insert 100k", ">13.1f", lambda row: row.long_insert_us),
            ("bytes/node", ">12.0f", lambda row: row.node_bytes),
        ],
        "microseconds, medians; 100k: a prompt of 100,000 tokens",
    )


def _measure(num_nodes: int) -> IndexCost:
    tree: RadixTree[int] = RadixTree()
    reuse = Reuse()
    eviction: EvictionOrder[Node[int]] = EvictionOrder(reuse, PrefillCost(), quantum_tokens=256)
    before = _resident_bytes()
    for which, prompt in enumerate(_prompts(num_nodes, first=0)):
        tree.insert(ROOT, prompt, which)
    node_bytes = (_resident_bytes() - before) / tree.num_nodes
    leaves = [node for node in tree if node.is_leaf]
    for at, leaf in enumerate(leaves):
        _add(eviction, leaf, float(at))
    now_s = float(len(leaves))
    stored = list(_prompts(SAMPLES, first=num_nodes // 2))
    fresh = list(_prompts(SAMPLES, first=num_nodes))
    long_prompts = [np.roll(np.arange(LONG_TOKENS, dtype=np.int32), -at) for at in range(1, 12)]
    return IndexCost(
        num_nodes=tree.num_nodes,
        match_us=_median_us([lambda p=p: tree.match(ROOT, p) for p in stored]),
        add_us=_median_us([lambda leaf=leaf: _add(eviction, leaf, now_s) for leaf in leaves[:SAMPLES]]),
        evict_us=_median_us([lambda: _evict(tree, eviction, now_s + 60)] * min(SAMPLES, num_nodes // 2)),
        insert_us=_median_us([lambda p=p: tree.insert(ROOT, p, 0) for p in fresh]),
        long_insert_us=_median_us([lambda p=p: tree.insert(ROOT, p, 0) for p in long_prompts]),
        long_match_us=_median_us([lambda p=p: tree.match(ROOT, p) for p in long_prompts]),
        node_bytes=node_bytes,
    )


def _prompts(number: int, first: int) -> Iterator[TokenIds]:
    """Each with tokens of its own after a shared beginning."""
    for which in range(first, first + number):
        shared = np.full(SHARED_TOKENS, which % NUM_SHARED, dtype=np.int32)
        own = np.arange(NUM_SHARED + which, NUM_SHARED + which + OWN_TOKENS, dtype=np.int32)
        yield np.concatenate((shared, own))


def _add(eviction: EvictionOrder[Node[int]], leaf: Node[int], used_s: float) -> None:
    kind = ReuseClass(int(used_s) % len(ReuseClass))
    nbytes = leaf.num_tokens * TOKEN_BYTES
    eviction.add(leaf, LeafValue(nbytes, leaf.start, leaf.num_tokens, used_s, kind))


def _evict(tree: RadixTree[int], eviction: EvictionOrder[Node[int]], now_s: float) -> None:
    for leaf, _ in eviction.choose(TOKEN_BYTES * OWN_TOKENS, now_s):
        tree.remove(leaf)


def _median_us(operations: Sequence[Callable[[], object]]) -> float:
    return statistics.median(map(seconds, operations)) * 1e6


def _resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss
