"""What the store would hold under a policy: tokens only, no KV, at one precision. Cheap enough to run beside the store.

`AgeShadow` is plain LRU: leaves first, the one used longest ago; it trims by single tokens. It is the baseline of
`bench replay`. `WorthShadow` evicts as the store does, by worth. The store follows the one that finds more.
"""

from __future__ import annotations

from kvstrata.index.ids import Tokens
from kvstrata.index.tree import Node, Tree
from kvstrata.store.eviction import Eviction
from kvstrata.store.leaf_queue import LeafQueue
from kvstrata.store.policy import Kind, PrefillCost, Reuse
from kvstrata.store.uses import Uses


class AgeShadow:
    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tree: Tree[None] = Tree()
        self._leaves: LeafQueue[Node[None]] = LeafQueue()
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


class WorthShadow:
    def __init__(self, reuse: Reuse, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tree: Tree[None] = Tree()
        self._uses = Uses()
        self._eviction: Eviction[Node[None]] = Eviction(reuse, PrefillCost(), quantum_tokens=1)

    def asked(self, root_key: bytes, tokens: Tokens, kind: Kind, now_s: float) -> int:
        """Find, file, make room. Tells how many tokens were found."""
        inserted = self.tree.insert(root_key, tokens, None)
        self._uses.inserted(inserted, kind, now_s)
        for node in (*inserted.path[-2:], *inserted.halves):
            self._offer(node)
        while self.tree.num_tokens > self.max_tokens:
            for leaf, keep_tokens in self._eviction.choose(self.tree.num_tokens - self.max_tokens, now_s):
                self._drop(leaf, keep_tokens)
        return inserted.num_matched

    def _drop(self, leaf: Node[None], keep_tokens: int) -> None:
        if keep_tokens:
            self.tree.trim(leaf, leaf.start + keep_tokens)
            self._offer(leaf)
            return
        self.tree.remove(leaf)
        self._uses.forget(leaf)
        if leaf.parent is not None:
            self._offer(leaf.parent)

    def _offer(self, node: Node[None]) -> None:
        if not node.is_leaf:
            self._eviction.discard(node)
            return
        used_s, kind = self._uses[node]
        tokens = node.num_tokens
        self._eviction.add(node, nbytes=tokens, start=node.start, num_tokens=tokens, used_s=used_s, kind=kind)
