"""Conversations on the disk: chains of blocks, each named by its tokens and all that comes before.

Walks them from the first token on, in small steps that the caller paces: what yields here does so after each block.
Asks the tier what it has, which it knows without a look at the disk. Does not know what is in memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kvstrata.disk.block import BlockId
from kvstrata.disk.tier import DiskTier
from kvstrata.index.ids import TokenIds
from kvstrata.index.keys import chain
from kvstrata.spans.blocks import BLOCK_TOKENS

MARK = "mark"

T = TypeVar("T")
Walk = Generator[None, None, T]


@dataclass(frozen=True)
class Step:
    """One block of a chain."""

    key: bytes
    parent: bytes
    start: int
    end: int
    nbytes: int = 0  # on the disk, or on its way there; 0: it is not there yet


@dataclass(frozen=True)
class ColdMatch:
    steps: tuple[Step, ...] = ()
    mark_bytes: int = 0  # of the mark at the end; 0: there need not be one

    @property
    def num_tokens(self) -> int:
        return self.steps[-1].end if self.steps else 0


@dataclass(frozen=True)
class OnDisk:
    """What the disk can say about a prompt."""

    num_tokens: int = 0  # that a sequence can go on from
    is_damaged_next: bool = False  # a block that goes on where the chain ends was found damaged, and put aside
    has_others_only: bool = False  # there are blocks, and none under this root


class Chains:
    def __init__(self, tier: DiskTier, *, needs_marks: bool) -> None:
        self._tier = tier
        self._needs_marks = needs_marks

    def match(self, root: bytes, ids: TokenIds) -> Walk[ColdMatch]:
        """The longest chain of blocks that begins these tokens, and that a sequence can go on from."""
        return (yield from self.longest(root, 0, ids, at_marks=self._needs_marks))

    def longest(self, parent: bytes, start: int, ids: TokenIds, *, at_marks: bool = False) -> Walk[ColdMatch]:
        """The longest chain after a parent, whether or not a sequence can go on from it; `at_marks`: that it can."""
        best = ColdMatch()
        for trail in self._trails(parent, start, ids):
            step = trail[-1]
            if step.end > best.num_tokens:
                mark_bytes = self._tier.size(BlockId(step.key, MARK)) if at_marks else 0
                if mark_bytes or not at_marks:
                    best = ColdMatch(tuple(trail), mark_bytes)
                    if step.end == len(ids):
                        return best
            yield
        return best

    def whole(self, root: bytes, ids: TokenIds, *, with_mark: bool) -> Walk[tuple[Step, ...]]:
        """The blocks of all these tokens, however they were cut, and a mark at their end; none where the disk has not
        all of it."""
        steps = (yield from self.longest(root, 0, ids)).steps
        is_whole = bool(steps) and steps[-1].end == len(ids)
        if is_whole and with_mark:
            is_whole = self._tier.find(steps[-1].key, MARK)
        return steps if is_whole else ()

    def about(self, root: bytes, ids: TokenIds) -> Walk[OnDisk]:
        """For people who ask why not more of a prompt is found."""
        match = yield from self.match(root, ids)
        return OnDisk(
            match.num_tokens,
            is_damaged_next=(yield from self._is_damaged_next(root, ids)),
            # A caller must not learn whose the other blocks are: we do not even look whether they have these tokens.
            has_others_only=self._tier.usage().num_blocks > 0 and not self._tier.lengths(root),
        )

    def _is_damaged_next(self, root: bytes, ids: TokenIds) -> Walk[bool]:
        damaged = self._tier.damaged_keys()
        if not damaged:
            return False
        steps = (yield from self.longest(root, 0, ids)).steps
        parent, start = (steps[-1].key, steps[-1].end) if steps else (root, 0)
        ends = range(start + 1, min(start + BLOCK_TOKENS, len(ids)) + 1)
        return any(chain(parent, ids[start:end]) in damaged for end in ends)

    def _trails(self, parent: bytes, start: int, ids: TokenIds) -> Iterator[list[Step]]:
        """All chains of blocks after a parent that these tokens go on with, each as long as any of its beginnings; long
        blocks first. It is the same list each time."""
        trail: list[Step] = []
        waiting = [self._following(parent, start, ids)]
        while waiting:
            step = next(waiting[-1], None)
            if step is None:
                waiting.pop()
                if trail:
                    trail.pop()
                continue
            trail.append(step)
            waiting.append(self._following(step.key, step.end, ids))
            yield trail

    def _following(self, parent: bytes, start: int, ids: TokenIds) -> Iterator[Step]:
        for length in self._tier.lengths(parent):
            end = start + length
            if end <= len(ids):
                key = chain(parent, ids[start:end])
                nbytes = self._tier.size(BlockId(key))
                if nbytes:
                    yield Step(key, parent, start, end, nbytes)


def finish(walk: Walk[T]) -> T:
    """All of it at once, on the caller's thread."""
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value
