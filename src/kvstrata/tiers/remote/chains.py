"""Chains of blocks in a store. Every walk queries the store, so it belongs on a thread of the tier.

Names follow from the tokens, so a chain of any length takes one query.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvstrata.tiers.block import BASE, CHECKPOINT, BlockId, Chain
from kvstrata.tiers.interface import ChainLink, MissingChain, PromptOnTier, TierMatch, TokenIds
from kvstrata.tiers.lookups import Walk
from kvstrata.tiers.remote.health import StoreFault, StoreHealth
from kvstrata.tiers.remote.sealing import BlockNames, links_of
from kvstrata.tiers.remote.store import KeyValueStore

# Checkpoints in one query, from the end of a chain backwards.
MARKS_AT_ONCE = 64

# Time for which names whose values were absent or damaged count as absent.
AVOIDED_S = 60.0

NUM_AVOIDED = 4096


class AvoidedNames:
    """Names that a store seemed to have, but whose values could not be read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: OrderedDict[str, float] = OrderedDict()

    def add(self, name: str) -> None:
        with self._lock:
            self._until_s[name] = self._clock() + AVOIDED_S
            if len(self._until_s) > NUM_AVOIDED:
                self._until_s.popitem(last=False)

    def discard(self, name: str) -> None:
        with self._lock:
            self._until_s.pop(name, None)

    def has(self, name: str) -> bool:
        with self._lock:
            return self._until_s.get(name, 0.0) > self._clock()


class RemoteChains:
    """Lookups of chains in a store. Implements `TierBlocks`."""

    def __init__(
        self,
        store: KeyValueStore,
        names: BlockNames,
        chain: Chain,
        health: StoreHealth,
        avoided: AvoidedNames,
        touch: Callable[[Sequence[str]], None],
    ) -> None:
        """Read from a store. `touch(names)` lets values expire later, on another thread."""
        self._store = store
        self._names = names
        self._chain = chain
        self._health = health
        self._avoided = avoided
        self._touch = touch

    # Queries for single blocks come from threads that must not wait for the store: the answers are constant.

    def find(self, key: bytes, part: str = BASE) -> int:
        del key, part
        return 0

    def contents(self, block: BlockId) -> Mapping[str, int]:
        del block
        return {}

    def num_children(self, key: bytes) -> int:
        """Return 1, because blocks of other servers are not counted here."""
        del key
        return 1

    def longest_chain(self, parent: bytes, start: int, ids: TokenIds, *, at_marks: bool = False) -> Walk[TierMatch]:
        """Return the longest chain of a root. `start` must be 0: a chain is queried from its first token on."""
        if start:
            raise ValueError("The chain of a remote tier begins at its first token")
        links = yield from self._present(links_of(self._chain, self._names.root_of(parent), ids))
        if not at_marks or not links:
            return TierMatch(tuple(links))
        yield
        return self._at_mark(links)

    def describe_prompt(self, root: bytes, ids: TokenIds, *, at_marks: bool) -> Walk[PromptOnTier]:
        match = yield from self.longest_chain(root, 0, ids, at_marks=at_marks)
        return PromptOnTier(match.num_tokens)

    def missing_chain(self, root: bytes, ids: TokenIds, marks: Sequence[int]) -> Walk[MissingChain]:
        """Return the absent blocks. Count the present ones as used."""
        own_root = self._names.root_of(root)
        links = links_of(self._chain, own_root, ids)
        present = yield from self._present(links)
        parts = (BASE, CHECKPOINT) if marks else (BASE,)
        self._touch([self._names.name_of(BlockId(link.key, part)) for link in present for part in parts])
        at_marks = [link for link in links if link.end in set(marks)]
        sizes = self._sizes([self._names.name_of(BlockId(link.key, CHECKPOINT)) for link in at_marks])
        missing = tuple(link for link, nbytes in zip(at_marks, sizes, strict=False) if not nbytes)
        return MissingChain(own_root, tuple(links[len(present) :]), missing, is_known=not self._health.is_paused)

    def _present(self, links: list[ChainLink]) -> Walk[list[ChainLink]]:
        yield
        names = [self._names.name_of(BlockId(link.key)) for link in links]
        usable = next((at for at, name in enumerate(names) if self._avoided.has(name)), len(names))
        if not usable or self._health.is_paused:
            return []
        try:
            with self._health.query(measures=True):
                sizes = self._store.leading(names[:usable])
        except StoreFault:
            return []
        return [replace(link, nbytes=nbytes) for link, nbytes in zip(links, sizes, strict=False)]

    def _at_mark(self, links: list[ChainLink]) -> TierMatch:
        """Return the chain up to its last block with a checkpoint."""
        for end in range(len(links), 0, -MARKS_AT_ONCE):
            first = max(0, end - MARKS_AT_ONCE)
            sizes = self._sizes([self._names.name_of(BlockId(link.key, CHECKPOINT)) for link in links[first:end]])
            for at in range(len(sizes) - 1, -1, -1):
                if sizes[at]:
                    return TierMatch(tuple(links[: first + at + 1]), sizes[at])
        return TierMatch()

    def _sizes(self, names: list[str]) -> list[int]:
        """Return the sizes of values; nothing if the store does not answer."""
        if not names or self._health.is_paused:
            return []
        try:
            with self._health.query():
                sizes = self._store.sizes(names)
        except StoreFault:
            return []
        return [0 if self._avoided.has(name) else nbytes for name, nbytes in zip(names, sizes, strict=True)]
