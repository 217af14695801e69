"""Plain LRU over the same tree, the baseline of `bench replay`: the leaf that was used longest ago goes first.

It may trim by single tokens, which costs it nothing here.
"""

from __future__ import annotations

from kvstrata.prefix_cache.eviction_order import TimeQueue
from kvstrata.prefix_cache.keys import Tokens
from kvstrata.prefix_cache.radix_tree import Node, RadixTree


class LruTree:
    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tree: RadixTree[None] = RadixTree()
        self._leaves: TimeQueue[Node[None]] = TimeQueue()
        self._used_s: dict[Node[None], float] = {}

    def asked(self, root_key: bytes, tokens: Tokens, now_s: float) -> int:
        """Find, file, make room. Tells how many tokens were found."""
        inserted = self.tree.insert(root_key, tokens, None)
        if inserted.halves:
            upper, lower = inserted.halves
            self._used_s[upper] = self._used_s[lower]
        for node in inserted.path:
            self._used_s[node] = now_s
            self._leaves.discard(node)
        for node in (*inserted.path[-1:], *inserted.halves):
            self._offer(node)
        while self.tree.num_tokens > self.max_tokens:
            self._evict(self.tree.num_tokens - self.max_tokens)
        return inserted.num_matched

    def _evict(self, num_over: int) -> None:
        leaf = self._leaves.oldest()
        assert leaf is not None
        if num_over < leaf.num_tokens:
            self.tree.trim(leaf, leaf.end - num_over)
            return
        self._leaves.discard(leaf)
        self.tree.remove(leaf)
        del self._used_s[leaf]
        if leaf.parent is not None:
            self._offer(leaf.parent)

    def _offer(self, node: Node[None]) -> None:
        if node.is_leaf:
            self._leaves.put(node, self._used_s[node], node.start)
