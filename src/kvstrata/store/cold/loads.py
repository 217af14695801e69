"""Blocks on their way from the disk into memory, block by block and never more of them than a bound.

Bytes are read by the tier's threads and become arrays here, on the thread that owns MLX, one block between two steps of
the engine. Half of the bound is for what is read and not yet an array, half for arrays that are not taken yet: before
more would come, they are handed on. Does not know what they are used for.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstrata.attention.parts import SealedPart
from kvstrata.errors import ConfigError
from kvstrata.index.ids import TokenIds
from kvstrata.layers.kinds import Layout
from kvstrata.spans.blocks import Packed, PackedArray, unpack, unpack_mark
from kvstrata.spans.marks import Mark
from kvstrata.store.entry import Lease
from kvstrata.tier.base import Tier
from kvstrata.tier.block import MARK, Block, BlockId
from kvstrata.tier.chains import Link, TierMatch
from kvstrata.tier.reading import BlockReading, Loaded, Missing

log = logging.getLogger(__name__)

# A load that cannot pay is given up after this share of the time that computing the tokens would take,
PATIENCE = 0.03
# but not before so long, nor before this share where that is less: a file that comes a tenth of a second late, behind a
# write or a busy core, is no reason to compute for seconds.
LEAST_PATIENCE_S = 0.5
MOST_PATIENCE = 0.5

Arrays = dict[int, SealedPart]  # of one block, by layer


@dataclass(frozen=True)
class Batch:
    """Blocks that follow each other."""

    blocks: tuple[Arrays, ...]
    links: tuple[Link, ...]
    start: int
    end: int


@dataclass(eq=False)
class BlockLoad:
    """Blocks of a prompt on their way into memory."""

    root: bytes
    salt: str
    ids: TokenIds  # all tokens up to the last block's end, or more
    match: TierMatch  # to be loaded; what comes before is in memory
    on_batch: Callable[[BlockLoad], None]  # take what has come, to make room for more
    on_done: Callable[[BlockLoad], None] = lambda _: None  # all is there, or no more will come
    began_s: float = 0.0
    lease: Lease | None = None  # on what it continues, and on what was taken
    blocks: list[Arrays] = field(default_factory=list)  # come and not taken
    num_bytes: int = 0  # of those
    num_taken: int = 0
    mark: Mark | None = None
    reading: BlockReading | None = None
    source: Loads | None = None  # where it comes from
    is_done: bool = False
    lacked_room: bool = False  # it ended because memory had no room for it, or none for what it hangs on

    @property
    def links(self) -> tuple[Link, ...]:
        return self.match.links

    @property
    def has_arrived(self) -> bool:
        """Whether blocks came of which it is not known yet that they are there."""
        return self.source is not None and self.source.has_arrived

    @property
    def num_come(self) -> int:
        return self.num_taken + len(self.blocks)

    @property
    def is_whole(self) -> bool:
        return self.num_come == len(self.links)

    @property
    def num_loaded_tokens(self) -> int:
        return self.links[self.num_come - 1].end - self.links[0].start if self.num_come else 0

    @property
    def num_tokens(self) -> int:
        return self.links[-1].end - self.links[0].start

    def take(self) -> Batch:
        """What has come since the last time."""
        links = self.links[self.num_taken : self.num_come]
        batch = Batch(tuple(self.blocks), links, links[0].start, links[-1].end) if links else Batch((), (), 0, 0)
        self.num_taken += len(self.blocks)
        self.blocks, self.num_bytes = [], 0
        return batch

    def gives_up_at(self, prefill_tokens_s: float) -> float:
        """When computing would have been faster, so far; 0: how fast that is is not known."""
        if not prefill_tokens_s:
            return math.inf
        compute_s = self.num_tokens / prefill_tokens_s
        patience_s = max(PATIENCE * compute_s, min(LEAST_PATIENCE_S, MOST_PATIENCE * compute_s))
        return self.began_s + self.num_loaded_tokens / prefill_tokens_s + patience_s


class Loads:
    """`wake` is called on a thread of the tier when something came: `take_in` should be called soon."""

    def __init__(
        self, tier: Tier, layout: Layout, *, wake: Callable[[], None], bound_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._tier = tier
        self._layout = layout
        self._wake = wake
        self._bound_bytes = bound_bytes
        self._clock = clock
        self._arrived: deque[tuple[BlockLoad, Loaded | Missing]] = deque()  # filled by the tier's threads
        self._active: dict[BlockLoad, None] = {}
        self.num_unreadable = 0  # blocks that were whole, and of no use

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived)

    @property
    def unused_bytes(self) -> int:
        """Arrays that wait to be taken."""
        return sum(load.num_bytes for load in self._active)

    def begin(self, load: BlockLoad) -> None:
        load.began_s = self._clock()
        load.source = self
        links, mark_bytes = load.links, load.match.mark_bytes
        wanted, sizes = [BlockId(link.key) for link in links], [link.nbytes for link in links]
        if mark_bytes:
            # First: without it the rest is of no use.
            wanted.insert(0, BlockId(links[-1].key, MARK))
            sizes.insert(0, mark_bytes)
        load.reading = self._tier.read(wanted, lambda came: self._arrive(load, came), root=load.root, sizes=sizes)
        self._active[load] = None

    def seconds_for(self, match: TierMatch) -> float:
        """What reading these blocks is expected to take."""
        return self._tier.rates.seconds_for(sum(match.sizes), len(match.sizes))

    def give_up(self, load: BlockLoad) -> None:
        if load.reading is not None:
            load.reading.cancel()
        self._end(load)

    def clear(self) -> None:
        """Give up all loads: what they were for is gone."""
        for load in list(self._active):
            self.give_up(load)

    def take_in(self, slice_s: float) -> None:
        """At least one block, then as many as the time allows."""
        until_s = time.monotonic() + slice_s
        while self._arrived:
            load, came = self._arrived.popleft()
            self._take_in(load, came)
            if time.monotonic() >= until_s:
                return

    def _arrive(self, load: BlockLoad, came: Loaded | Missing) -> None:
        self._arrived.append((load, came))
        self._wake()

    def _take_in(self, load: BlockLoad, came: Loaded | Missing) -> None:
        try:
            if not load.is_done:
                self._keep(load, came)
        finally:
            came.release()

    def _keep(self, load: BlockLoad, came: Loaded | Missing) -> None:
        if isinstance(came, Missing):
            self._fail(load)
            return
        self._make_room(came.block.nbytes)
        if load.is_done:
            return  # there was no room
        try:
            if came.block.part == MARK:
                load.mark = unpack_mark(_packed(came.block))
                return
            start, end = came.block.start, came.block.start + came.block.num_tokens
            load.blocks.append(unpack(self._layout, _packed(came.block), start, end))
        except Exception as error:
            # Verified bytes that this version cannot read: a miss, whatever the reason, and never a failed request.
            self.num_unreadable += 1
            log.exception("a block of the cache cannot be read by this version")
            if isinstance(error, ConfigError):
                # It would stand for one that can be read.
                self._tier.remove([came.block.id])
            self._fail(load)
            return
        load.num_bytes += came.block.nbytes
        if load.is_whole:
            self._end(load)
            load.on_done(load)

    def _make_room(self, nbytes: int) -> None:
        if self.unused_bytes + nbytes <= self._bound_bytes:
            return
        for other in list(self._active):
            if other.blocks:
                other.on_batch(other)

    def _fail(self, load: BlockLoad) -> None:
        self.give_up(load)
        load.on_done(load)

    def _end(self, load: BlockLoad) -> None:
        load.is_done = True
        self._active.pop(load, None)


def _packed(block: Block) -> Packed:
    arrays: dict[str, PackedArray] = {}
    for name, tensor in block.tensors.items():
        octets = np.frombuffer(tensor.view(), np.uint8)
        arrays[name] = PackedArray(tensor.dtype, tensor.shape, octets)
    description: dict[str, Any] = dict(block.description)
    return Packed(arrays, description)
