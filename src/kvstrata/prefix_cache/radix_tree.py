"""A radix tree over token ids, with a root for each identity and salt: the longest common prefix, at any token.

The tree knows tokens and positions. A node's payload belongs to the caller; payloads carry absolute positions, so that
both halves of a split node can keep the same one. The tree compares tokens, never hashes. It knows no KV, bytes, time,
leases or eviction.

Identity of nodes: a split makes a new node for the upper half, and `merge` drops the upper node. The lower node, the
links of its children and the caller's references to it stay valid. Protecting a node protects all nodes above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from kvstrata.common_prefix import common_prefix_len
from kvstrata.prefix_cache.keys import TokenIds, Tokens, as_ids

P = TypeVar("P")

Outcome = Literal["present", "extended", "added", "split"]

# Most nodes are leaves, and an empty dict for each would be a third of their memory.
NO_CHILDREN: Mapping[int, Any] = MappingProxyType({})

SHORT_RUN = 256


class Node(Generic[P]):
    """A run of tokens without a branch. Compared and hashed by identity."""

    __slots__ = ("__weakref__", "_buffer", "_children", "_num_tokens", "parent", "payload", "root_key", "start")

    def __init__(self, root_key: bytes, parent: Node[P] | None, start: int, tokens: TokenIds, payload: P) -> None:
        self.root_key = root_key
        self.parent = parent  # None: directly under the root
        self.start = start  # absolute position of the first token
        self.payload = payload
        self._buffer = tokens.copy()  # may be longer than the tokens in use: it grows ahead
        self._num_tokens = len(tokens)
        self._children: dict[int, Node[P]] | None = None

    def __repr__(self) -> str:
        return f"Node({self.start}:{self.end}, children={len(self.children)}, payload={self.payload!r})"

    @property
    def tokens(self) -> TokenIds:
        """Tokens of this node, as a read-only view that later changes of the node do not affect."""
        view = self._buffer[: self._num_tokens]
        view.flags.writeable = False
        return view

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def end(self) -> int:
        return self.start + self._num_tokens

    @property
    def children(self) -> Mapping[int, Node[P]]:
        """Children by their first token."""
        return NO_CHILDREN if self._children is None else self._children

    @property
    def is_leaf(self) -> bool:
        return not self._children

    def path(self) -> tuple[Node[P], ...]:
        """Return the nodes from the root down to this node."""
        nodes: list[Node[P]] = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return tuple(reversed(nodes))

    def _extend(self, tokens: TokenIds) -> None:
        total = self._num_tokens + len(tokens)
        if total > len(self._buffer):
            # It grows by half, so that a reply inserted token by token is not copied for each token.
            grown = np.empty(total + total // 2, dtype=np.int32)
            grown[: self._num_tokens] = self._buffer[: self._num_tokens]
            self._buffer = grown
        self._buffer[self._num_tokens : total] = tokens
        self._num_tokens = total

    def _keep(self, first: int, last: int) -> None:
        """Drop all tokens except `first` to `last`, counted from this node's start.

        The rest is copied, because older views of `tokens` must not change when this node is extended again.
        """
        self._buffer = self._buffer[first:last].copy()
        self._num_tokens = last - first
        self.start += first

    def _num_common(self, ids: TokenIds, position: int) -> int:
        """Return how many tokens of `ids` from `position` on match this node. The caller has compared the first one."""
        length = min(self._num_tokens, len(ids) - position)
        if length == 1:
            return 1
        own, given = self._buffer[:length], ids[position : position + length]
        # Most short runs are equal, and comparing bytes takes a third of the time of an elementwise comparison.
        if length <= SHORT_RUN and own.tobytes() == given.tobytes():
            return length
        return common_prefix_len(own, given)


# Every request constructs a `Match` for each tree. Named tuples take a quarter of the time of a frozen dataclass.
class Match(NamedTuple, Generic[P]):
    """Longest prefix of some tokens that is in the tree."""

    path: tuple[Node[P], ...]  # from the root; the last node may match in part
    num_tokens: int


class Inserted(NamedTuple, Generic[P]):
    """Result of an insertion.

    `outcome`: "present" if nothing was new; "extended" if the last node of the path grew; "added" if the last node is
    new; "split" if the last node is new, and its parent is the new upper half of a split node.
    """

    path: tuple[Node[P], ...]  # from the root; covers all tokens
    num_matched: int  # tokens that were present before
    outcome: Outcome
    halves: tuple[Node[P], ...] = ()  # after a split: the new upper node, and the lower one, which existed before


@dataclass(frozen=True)
class Divergence:
    """Position where a match ends, and the continuations that the tree has there."""

    num_tokens: int  # matched; the token at this position is the first that differs
    instead: tuple[tuple[int, ...], ...]  # first ids of some continuations
    num_instead: int  # number of all continuations
    is_root_known: bool  # False: the tree has nothing under this identity and salt


class RadixTree(Generic[P]):
    """Trees of nodes, by root key."""

    def __init__(self) -> None:
        self._roots: dict[bytes, dict[int, Node[P]]] = {}
        self._num_nodes = 0
        self._num_tokens = 0

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def root_keys(self) -> tuple[bytes, ...]:
        return tuple(self._roots)

    def __iter__(self) -> Iterator[Node[P]]:
        """Yield every node, parents before their children. The tree must not change meanwhile."""
        for root_key in self._roots:
            yield from self.nodes(root_key)

    def children_of_root(self, root_key: bytes) -> Mapping[int, Node[P]]:
        """Return the nodes directly under a root by their first token; none if the tree has no such root."""
        return self._roots.get(root_key, NO_CHILDREN)

    def nodes(self, root_key: bytes) -> Iterator[Node[P]]:
        """Yield the nodes under a root, parents before their children. The tree must not change meanwhile."""
        pending = list(self.children_of_root(root_key).values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def match(self, root_key: bytes, tokens: Tokens) -> Match[P]:
        """Return the longest prefix of `tokens` under this root."""
        path, num_tokens = self._walk(root_key, as_ids(tokens))
        return Match(tuple(path), num_tokens)

    def insert(self, root_key: bytes, tokens: Tokens, payload: P) -> Inserted[P]:
        """Insert `tokens`. Nodes that match keep their payloads.

        The rest becomes a node with `payload`, or extends the last matching node if that is a leaf with the same
        payload.
        """
        ids = as_ids(tokens)
        path, num_matched = self._walk(root_key, ids)
        rest = ids[num_matched:]
        if not len(rest):
            return Inserted(tuple(path), num_matched, "present")
        self._num_tokens += len(rest)
        halves: tuple[Node[P], ...] = ()
        if path and num_matched < path[-1].end:
            halves = self._split(path[-1], num_matched)
            path[-1] = halves[0]
        elif path and path[-1].is_leaf and path[-1].payload is payload:
            path[-1]._extend(rest)
            return Inserted(tuple(path), num_matched, "extended")
        parent = path[-1] if path else None
        path.append(self._attach(Node(root_key, parent, num_matched, rest, payload)))
        return Inserted(tuple(path), num_matched, "split" if halves else "added", halves)

    def add_child(self, parent: Node[P] | None, root_key: bytes, tokens: Tokens, payload: P) -> Node[P]:
        """Add a node for `tokens` below `parent`, or directly under the root (None). Return the new node.

        For callers that copy nodes: nothing is matched. No child of the parent may begin with the same token.
        """
        ids = as_ids(tokens)
        if parent is None:
            siblings, start = self.children_of_root(root_key), 0
        else:
            self._require_in_tree(parent)
            siblings, start = parent.children, parent.end
            if parent.root_key != root_key:
                raise ValueError("A child is under the same root as its parent")
        if not len(ids) or ids.item(0) in siblings:
            raise ValueError("A child has tokens, and the first one differs from that of each other child")
        self._num_tokens += len(ids)
        return self._attach(Node(root_key, parent, start, ids, payload))

    def split(self, node: Node[P], position: int) -> Node[P]:
        """Split a node at an absolute position inside it. Return the upper half, which is the new node."""
        self._require_in_tree(node)
        if not node.start < position < node.end:
            raise ValueError(f"Cannot split tokens {node.start} to {node.end} at {position}")
        return self._split(node, position)[0]

    def trim(self, leaf: Node[P], end: int) -> None:
        """Drop the tokens of a leaf from the absolute position `end` on. At least one token must remain."""
        self._require_leaf(leaf)
        if not leaf.start < end <= leaf.end:
            raise ValueError(f"Cannot trim tokens {leaf.start} to {leaf.end} at {end}; remove() drops a whole leaf")
        self._num_tokens -= leaf.end - end
        leaf._keep(0, end - leaf.start)

    def remove(self, leaf: Node[P]) -> None:
        """Remove a leaf, and its root if no node is left under it."""
        self._require_leaf(leaf)
        siblings = self._siblings(leaf)
        del siblings[leaf._buffer.item(0)]
        if not siblings:
            self._drop_empty(leaf)
        self._num_nodes -= 1
        self._num_tokens -= leaf.num_tokens

    def drop(self, root_key: bytes) -> None:
        """Remove a root and all nodes under it."""
        for node in self.nodes(root_key):
            self._num_nodes -= 1
            self._num_tokens -= node.num_tokens
        self._roots.pop(root_key, None)

    def merge(self, node: Node[P]) -> Node[P]:
        """Join a node with its only child if both have the same payload.

        Return the node that has its tokens afterwards: the child, or `node` itself if nothing was joined.
        """
        self._require_in_tree(node)
        child = next(iter(node.children.values()), None)
        if child is None or len(node.children) > 1 or child.payload is not node.payload:
            return node
        child._buffer = np.concatenate((node.tokens, child.tokens))
        child._num_tokens = len(child._buffer)
        child.start = node.start
        child.parent = node.parent
        self._siblings(node)[child._buffer.item(0)] = child
        node._children = None
        self._num_nodes -= 1
        return child

    def diverged(self, root_key: bytes, tokens: Tokens, max_instead: int = 8, run_tokens: int = 12) -> Divergence:
        """Return where the match of `tokens` ends, and how the tree continues there.

        There is no continuation where a leaf ends at that position. If all of `tokens` match, the continuations follow
        their end.
        """
        path, num_tokens = self._walk(root_key, as_ids(tokens))
        if path and num_tokens < path[-1].end:
            return Divergence(num_tokens, (_run(path[-1], num_tokens, run_tokens),), 1, True)
        children = path[-1].children if path else self._roots.get(root_key, NO_CHILDREN)
        first_few = tuple(_run(node, node.start, run_tokens) for node in islice(children.values(), max_instead))
        return Divergence(num_tokens, first_few, len(children), root_key in self._roots)

    def _walk(self, root_key: bytes, ids: TokenIds) -> tuple[list[Node[P]], int]:
        """Return the matching nodes, the last one possibly in part, and the number of matching tokens."""
        path: list[Node[P]] = []
        children: Mapping[int, Node[P]] = self._roots.get(root_key, NO_CHILDREN)
        position, end = 0, len(ids)
        while position < end and (node := children.get(ids.item(position))) is not None:
            path.append(node)
            num_common = node._num_common(ids, position)
            position += num_common
            if num_common < node._num_tokens or node._children is None:
                break
            children = node._children
        return path, position

    def _split(self, lower: Node[P], position: int) -> tuple[Node[P], Node[P]]:
        """Move the tokens before `position` to a new upper node."""
        size = position - lower.start
        upper = Node(lower.root_key, lower.parent, lower.start, lower._buffer[:size], lower.payload)
        self._attach(upper)
        lower._keep(size, lower.num_tokens)
        lower.parent = upper
        upper._children = {lower._buffer.item(0): lower}
        return upper, lower

    def _attach(self, node: Node[P]) -> Node[P]:
        """Link a node to its parent, in place of a node that starts with the same token."""
        if node.parent is None:
            siblings = self._roots.setdefault(node.root_key, {})
        else:
            siblings = node.parent._children
            if siblings is None:
                siblings = node.parent._children = {}
        siblings[node._buffer.item(0)] = node
        self._num_nodes += 1
        return node

    def _siblings(self, node: Node[P]) -> dict[int, Node[P]]:
        """Return the dict of the parent or root that links `node`."""
        siblings = self._roots.get(node.root_key) if node.parent is None else node.parent._children
        return {} if siblings is None else siblings

    def _drop_empty(self, removed: Node[P]) -> None:
        if removed.parent is None:
            del self._roots[removed.root_key]
        else:
            removed.parent._children = None

    def _require_in_tree(self, node: Node[P]) -> None:
        if self._siblings(node).get(node._buffer.item(0)) is not node:
            raise ValueError("This node is not in the tree (any more)")

    def _require_leaf(self, node: Node[P]) -> None:
        self._require_in_tree(node)
        if not node.is_leaf:
            raise ValueError(f"A node with {len(node.children)} children cannot be cut: remove those first")


def _run(node: Node[Any], start: int, num_tokens: int) -> tuple[int, ...]:
    """Return up to `num_tokens` ids from `start` on, not beyond a branch."""
    ids = node.tokens[start - node.start :][:num_tokens].tolist()
    while len(ids) < num_tokens and len(node.children) == 1:
        (node,) = node.children.values()
        ids += node.tokens[: num_tokens - len(ids)].tolist()
    return tuple(ids)
