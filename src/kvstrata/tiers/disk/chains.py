"""Chains of blocks on the disk or in its queue. Answers from memory; knows no files.

A walk follows a chain from its first token on. It yields after each block, so that the caller can pace it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvstrata.tiers.block import BASE, BLOCK_TOKENS, CHECKPOINT, BlockId, Chain
from kvstrata.tiers.disk.block_store import DiskBlockStore
from kvstrata.tiers.disk.index import read_labels
from kvstrata.tiers.disk.reader import DiskReader
from kvstrata.tiers.interface import ChainLink, PromptOnTier, TierMatch, TokenIds
from kvstrata.tiers.lookups import Walk
from kvstrata.tiers.write_limits import WriteQueue


class DiskChains:
    def __init__(self, store: DiskBlockStore, queue: WriteQueue, reader: DiskReader, chain: Chain) -> None:
        self._store = store
        self._queue = queue
        self._reader = reader
        self._chain = chain

    def find(self, key: bytes, part: str = BASE) -> int:
        block = BlockId(key, part)
        return 0 if self._reader.avoided(block) else self.size(block)

    def size(self, block: BlockId) -> int:
        """Return the bytes as `find` does, also for a block that is avoided for a while."""
        # The queue first: a block has its record before it leaves the queue.
        for queued in self._queue.find(block):
            return max(1, queued.nbytes)
        record = self._store.index.get(block)
        # At least 1: some file systems keep small files elsewhere.
        return 0 if record is None else max(1, record.disk_bytes)

    def contents(self, block: BlockId) -> Mapping[str, int]:
        for queued in self._queue.find(block):
            return self._store.count_labels(queued.description, queued.tensor_bytes)
        record = self._store.index.get(block)
        return {} if record is None else read_labels(record.labels)

    def num_children(self, key: bytes) -> int:
        """Return the number of blocks that directly follow a block. A block that is being written counts twice."""
        return self._queue.num_children(key) + self._store.index.num_children(key)

    def lengths(self, parent: bytes) -> tuple[int, ...]:
        """Return the lengths in tokens of the blocks that follow `parent`, longest first."""
        queued = self._queue.lengths_after(parent)
        return tuple(sorted(queued.union(self._store.index.lengths_after(parent)), reverse=True))

    def longest_chain(self, parent: bytes, start: int, ids: TokenIds, *, at_marks: bool = False) -> Walk[TierMatch]:
        best = TierMatch()
        for trail in self._trails(parent, start, ids):
            link = trail[-1]
            if link.end > best.num_tokens:
                mark_bytes = self.find(link.key, CHECKPOINT) if at_marks else 0
                if mark_bytes or not at_marks:
                    best = TierMatch(tuple(trail), mark_bytes)
                    if link.end == len(ids):
                        return best
            yield
        return best

    def describe_prompt(self, root: bytes, ids: TokenIds, *, at_marks: bool) -> Walk[PromptOnTier]:
        match = yield from self.longest_chain(root, 0, ids, at_marks=at_marks)
        return PromptOnTier(
            match.num_tokens,
            is_damaged_next=(yield from self._is_damaged_next(root, ids)),
            # Blocks of other roots belong to other callers, so their tokens are not compared with this prompt.
            has_others_only=self._store.index.totals().num_blocks > 0 and not self.lengths(root),
        )

    def _is_damaged_next(self, root: bytes, ids: TokenIds) -> Walk[bool]:
        damaged = self._store.quarantine.keys()
        if not damaged:
            return False
        links = (yield from self.longest_chain(root, 0, ids)).links
        parent, start = (links[-1].key, links[-1].end) if links else (root, 0)
        ends = range(start + 1, min(start + BLOCK_TOKENS, len(ids)) + 1)
        return any(self._chain(parent, ids[start:end]) in damaged for end in ends)

    def _trails(self, parent: bytes, start: int, ids: TokenIds) -> Iterator[list[ChainLink]]:
        """Yield all chains of blocks after a parent that match `ids`: a chain's prefixes before the chain, long blocks
        first. The yielded list is the same object each time."""
        trail: list[ChainLink] = []
        waiting = [self._following(parent, start, ids)]
        while waiting:
            link = next(waiting[-1], None)
            if link is None:
                waiting.pop()
                if trail:
                    trail.pop()
                continue
            trail.append(link)
            waiting.append(self._following(link.key, link.end, ids))
            yield trail

    def _following(self, parent: bytes, start: int, ids: TokenIds) -> Iterator[ChainLink]:
        for length in self.lengths(parent):
            end = start + length
            if end <= len(ids):
                key = self._chain(parent, ids[start:end])
                nbytes = self.find(key)
                if nbytes:
                    is_queued = bool(self._queue.find(BlockId(key)))
                    yield ChainLink(key, parent, start, end, nbytes, is_queued)
