# ruff: noqa: ARG002
"""The tier of a server without one: it has no blocks and refuses all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvstrata.tiers.block import BASE, Block, BlockId
from kvstrata.tiers.interface import (
    Accepted,
    Flushed,
    OnDisk,
    Refusal,
    Refused,
    Removed,
    TierMatch,
    TokenIds,
    Usage,
    Writing,
)
from kvstrata.tiers.lookups import Lookup, Walk, answered
from kvstrata.tiers.read_pool import BlockReading, Deliver, Missing, MissReason
from kvstrata.tiers.read_rates import Rates
from kvstrata.tiers.removals import RemovalLog

T = TypeVar("T")


class NoBlocks:
    def find(self, key: bytes, part: str = BASE) -> int:
        return 0

    def contents(self, block: BlockId) -> Mapping[str, int]:
        return {}

    def num_after(self, key: bytes) -> int:
        return 0

    def longest(self, parent: bytes, start: int, ids: TokenIds, *, at_marks: bool = False) -> Walk[TierMatch]:
        yield from ()
        return TierMatch()

    def about(self, root: bytes, ids: TokenIds, *, at_marks: bool) -> Walk[OnDisk]:
        yield from ()
        return OnDisk()


class NoTier:
    limit_bytes = 0
    read_ahead_bytes = 0

    def __init__(self) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self.blocks = NoBlocks()
        self.rates = Rates()
        self.removals = RemovalLog()

    def look(self, walk: Walk[T], otherwise: T, on_answer: Callable[[], None]) -> Lookup[T]:
        """Return a lookup that has its answer: there is no thread."""
        return answered(otherwise)

    def put(
        self, block: Block, *, asked_twice: bool = False, replace: bool = False, unused_s: float = 0.0
    ) -> Accepted | Refused:
        return Refused(Refusal.TOO_LARGE, block.nbytes)

    def read(
        self, blocks: Sequence[BlockId], deliver: Deliver, *, root: bytes, sizes: Sequence[int] | None = None
    ) -> BlockReading:
        reading = BlockReading(blocks, root, deliver, sizes or [0] * len(blocks))
        for index, block in enumerate(blocks):
            reading.give(index, Missing(block, MissReason.ABSENT))
        return reading

    def touch(self, blocks: Iterable[BlockId]) -> None:
        return

    def remove(self, blocks: Sequence[BlockId], *, durable: bool = False) -> Removed:
        return Removed()

    def clear(self, under: bytes = b"") -> Removed:
        return Removed()

    def writing(self) -> Writing:
        return Writing(is_failing=True)

    def end_pause(self) -> None:
        return

    def flush(self, timeout_s: float) -> Flushed:
        return Flushed()

    def usage(self, under: bytes = b"") -> Usage:
        return Usage()

    def close(self) -> None:
        return
