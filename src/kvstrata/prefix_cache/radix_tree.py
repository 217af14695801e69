"""A radix tree over token ids, with one root for each identity and salt: the longest common prefix, at any token.

Knows tokens and positions; a node's payload is whatever the caller keeps there, and payloads carry absolute positions,
so that both halves of a split node can go on with the same one. Tokens are compared, never hashes. Does not know KV,
bytes, time, leases or what should be evicted.

Identity of nodes: a split makes a new node for the upper half, and `merge` drops the upper one, so the lower node, its
children's links and whatever the caller remembers about it stay valid. What protects a node protects all that is above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from kvstrata.prefix_cache.keys import TokenIds, Tokens, as_ids

P = TypeVar("P")

Outcome = Literal["present", "extended", "added", "split"]

# Most nodes are leaves, and an empty dict of their own would be a third of what they take.
NO_CHILDREN: Mapping[int, Any] = MappingProxyType({})

SHORT_RUN = 256


class Node(Generic[P]):
    """A run of tokens that is stored as one. Compared and hashed by identity."""

    __slots__ = ("__weakref__", "_buffer", "_children", "_num_tokens", "parent", "payload", "root_key", "start")

    def __init__(self, root_key: bytes, parent: Node[P] | None, start: int, tokens: TokenIds, payload: P) -> None:
        self.root_key = root_key
        self.parent = parent  # None: directly under the root
        self.start = start  # absolute position of the first token
        self.payload = payload
        self._buffer = tokens.copy()  # may be longer than what is used: it grows ahead
        self._num_tokens = len(tokens)
        self._children: dict[int, Node[P]] | None = None

    def __repr__(self) -> str:
        return f"Node({self.start}:{self.end}, children={len(self.children)}, payload={self.payload!r})"

    @property
    def tokens(self) -> TokenIds:
        """Read-only, and never changes: what the node gains or loses later is not seen through it."""
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
        """By first token."""
        return NO_CHILDREN if self._children is None else self._children

    @property
    def is_leaf(self) -> bool:
        return not self._children

    def path(self) -> tuple[Node[P], ...]:
        """From the root down to this node."""
        nodes: list[Node[P]] = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return tuple(reversed(nodes))

    def _extend(self, tokens: TokenIds) -> None:
        total = self._num_tokens + len(tokens)
        if total > len(self._buffer):
            # By half as much again, so that a reply filed token by token is not copied for each.
            grown = np.empty(total + total // 2, dtype=np.int32)
            grown[: self._num_tokens] = self._buffer[: self._num_tokens]
            self._buffer = grown
        self._buffer[self._num_tokens : total] = tokens
        self._num_tokens = total

    def _keep(self, first: int, last: int) -> None:
        """Drop all tokens but these, counted from this node's start. A copy: older views of `tokens` must stay as they
        were when this node is extended again."""
        self._buffer = self._buffer[first:last].copy()
        self._num_tokens = last - first
        self.start += first

    def _common(self, wanted: TokenIds, position: int) -> int:
        """How many tokens from `position` on are this node's. The first one is known to be."""
        length = min(self._num_tokens, len(wanted) - position)
        if length == 1:
            return 1
        stored, asked = self._buffer[:length], wanted[position : position + length]
        # Most short runs are equal, and comparing their bytes takes a third of the time of finding no difference.
        if length <= SHORT_RUN and stored.tobytes() == asked.tobytes():
            return length
        differ = stored != asked
        first = int(differ.argmax())
        return first if differ[first] else length


# Named tuples where one is made for each request and tree: they take a quarter of the time of a frozen dataclass.
class Match(NamedTuple, Generic[P]):
    path: tuple[Node[P], ...]  # from the root; of the last one maybe only the first tokens
    num_tokens: int


class Inserted(NamedTuple, Generic[P]):
    """present: nothing new. extended: the last node of the path grew. added: it is new. split: it is new, and so is the
    one before it, the upper one of `halves`."""

    path: tuple[Node[P], ...]  # from the root; covers all tokens
    num_matched: int  # tokens that were there before
    outcome: Outcome
    halves: tuple[Node[P], ...] = ()  # of a split: the new upper node, and the lower one, which was there before


@dataclass(frozen=True)
class Divergence:
    """Where a match ends, and why."""

    num_tokens: int  # that match: the token at this position is the first that differs
    instead: tuple[tuple[int, ...], ...]  # how what is stored goes on from that position: a few ways, a few ids of each
    num_instead: int  # how many ways there are
    is_root_known: bool  # False: nothing is stored under this identity and salt at all


class RadixTree(Generic[P]):
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
        """Every node, parents before their children. Not while the tree changes."""
        for root_key in self._roots:
            yield from self.nodes(root_key)

    def nodes(self, root_key: bytes) -> Iterator[Node[P]]:
        """Those under one root, parents before their children. Not while the tree changes."""
        waiting = list(self._roots.get(root_key, NO_CHILDREN).values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def match(self, root_key: bytes, tokens: Tokens) -> Match[P]:
        """The longest prefix of `tokens` that is stored under this root."""
        path, num_tokens = self._walk(root_key, as_ids(tokens))
        return Match(tuple(path), num_tokens)

    def insert(self, root_key: bytes, tokens: Tokens, payload: P) -> Inserted[P]:
        """What is there already is kept, with its payload. The rest becomes one node with `payload`, or makes the last
        node longer where that is a leaf with this same payload."""
        wanted = as_ids(tokens)
        path, num_matched = self._walk(root_key, wanted)
        rest = wanted[num_matched:]
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

    def split(self, node: Node[P], position: int) -> Node[P]:
        """In two at an absolute position inside it. Returns the upper half, which is the new one."""
        self._require_stored(node)
        if not node.start < position < node.end:
            raise ValueError(f"Cannot split tokens {node.start} to {node.end} at {position}")
        return self._split(node, position)[0]

    def trim(self, leaf: Node[P], end: int) -> None:
        """Drop the last tokens of a leaf, from the absolute position `end` on. At least one token stays."""
        self._require_leaf(leaf)
        if not leaf.start < end <= leaf.end:
            raise ValueError(f"Cannot trim tokens {leaf.start} to {leaf.end} at {end}; remove() drops a whole leaf")
        self._num_tokens -= leaf.end - end
        leaf._keep(0, end - leaf.start)

    def remove(self, leaf: Node[P]) -> None:
        """A root without nodes goes with its last one."""
        self._require_leaf(leaf)
        siblings = self._siblings(leaf)
        del siblings[leaf._buffer.item(0)]
        if not siblings:
            self._drop_empty(leaf)
        self._num_nodes -= 1
        self._num_tokens -= leaf.num_tokens

    def drop(self, root_key: bytes) -> None:
        """A root and all that is under it."""
        for node in self.nodes(root_key):
            self._num_nodes -= 1
            self._num_tokens -= node.num_tokens
        self._roots.pop(root_key, None)

    def merge(self, node: Node[P]) -> Node[P]:
        """Join `node` with its only child where both have the same payload. Returns the node that holds its tokens
        then: the child, or `node` itself where there is nothing to join."""
        self._require_stored(node)
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
        """Where the match of `tokens` ends, and what is stored there instead. Nothing is, where a stored prompt ends
        there; where all of `tokens` match, `instead` is how the stored ones go on."""
        path, num_tokens = self._walk(root_key, as_ids(tokens))
        if path and num_tokens < path[-1].end:
            return Divergence(num_tokens, (_run(path[-1], num_tokens, run_tokens),), 1, True)
        following = path[-1].children if path else self._roots.get(root_key, NO_CHILDREN)
        first_few = tuple(_run(node, node.start, run_tokens) for node in islice(following.values(), max_instead))
        return Divergence(num_tokens, first_few, len(following), root_key in self._roots)

    def _walk(self, root_key: bytes, wanted: TokenIds) -> tuple[list[Node[P]], int]:
        """The nodes that match, the last one maybe in part, and how many tokens that is."""
        path: list[Node[P]] = []
        children: Mapping[int, Node[P]] = self._roots.get(root_key, NO_CHILDREN)
        position, end = 0, len(wanted)
        while position < end and (node := children.get(wanted.item(position))) is not None:
            path.append(node)
            common = node._common(wanted, position)
            position += common
            if common < node._num_tokens or node._children is None:
                break
            children = node._children
        return path, position

    def _split(self, lower: Node[P], position: int) -> tuple[Node[P], Node[P]]:
        """A new node takes the tokens before `position`."""
        size = position - lower.start
        upper = Node(lower.root_key, lower.parent, lower.start, lower._buffer[:size], lower.payload)
        self._attach(upper)
        lower._keep(size, lower.num_tokens)
        lower.parent = upper
        upper._children = {lower._buffer.item(0): lower}
        return upper, lower

    def _attach(self, node: Node[P]) -> Node[P]:
        """Takes the place of a node that starts with the same token, if there is one."""
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
        """The dict that `node` is in."""
        found = self._roots.get(node.root_key) if node.parent is None else node.parent._children
        return {} if found is None else found

    def _drop_empty(self, removed: Node[P]) -> None:
        if removed.parent is None:
            del self._roots[removed.root_key]
        else:
            removed.parent._children = None

    def _require_stored(self, node: Node[P]) -> None:
        if self._siblings(node).get(node._buffer.item(0)) is not node:
            raise ValueError("This node is not in the tree (any more)")

    def _require_leaf(self, node: Node[P]) -> None:
        self._require_stored(node)
        if not node.is_leaf:
            raise ValueError(f"A node with {len(node.children)} children cannot be cut: remove those first")


def _run(node: Node[Any], start: int, num_tokens: int) -> tuple[int, ...]:
    """What is stored from `start` on, as far as there is only one way to go."""
    ids = node.tokens[start - node.start :][:num_tokens].tolist()
    while len(ids) < num_tokens and len(node.children) == 1:
        (node,) = node.children.values()
        ids += node.tokens[: num_tokens - len(ids)].tolist()
    return tuple(ids)
