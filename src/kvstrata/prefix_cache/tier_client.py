"""Between the cache and one tier: lookups, pins, block loads.

A conversation is a chain of blocks on a tier. The key of a block hashes its tokens and all tokens before them, and a
block is written after its parent, so a walk from the first token reaches every block. Bytes of a tier become arrays
here, on the thread that owns MLX; tier threads see bytes only, and walk the chains for lookups.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvstrata.attention.segments import SealedSegment
from kvstrata.errors import ConfigError
from kvstrata.kv.checkpoints import Checkpoint, needs_checkpoints
from kvstrata.kv.layout import Layout
from kvstrata.kv.packing import bytes_by_precision, unpack, unpack_checkpoint
from kvstrata.prefix_cache.entries import Entry, Lease
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.tiers.block import BASE, CHECKPOINT, Block, BlockContent, BlockId
from kvstrata.tiers.interface import ChainLink, NoTier, PromptOnTier, Removed, Tier, TierMatch
from kvstrata.tiers.lookups import Lookup, Walk
from kvstrata.tiers.read_pool import BlockReading, LoadedBlock, MissingBlock

log = logging.getLogger(__name__)

# A load that falls behind computing is cancelled after this share of the time that computing its tokens would take.
LATE_SHARE = 0.03

# The least time before a load is cancelled, or `MAX_PATIENCE` of the computing time where that is less: a file that
# arrives a tenth of a second late, behind a write or a busy core, is no reason to compute for seconds.
MIN_PATIENCE_S = 0.5

MAX_PATIENCE = 0.5

Arrays = dict[int, SealedSegment]  # of one block, by layer


@dataclass(frozen=True)
class LoadedBlocks:
    """Consecutive blocks of a load."""

    blocks: tuple[Arrays, ...]
    links: tuple[ChainLink, ...]
    start: int
    end: int


@dataclass(eq=False)
class BlockLoad:
    """Load of consecutive blocks of a prompt into memory."""

    root: bytes
    salt: str
    ids: TokenIds  # all tokens up to the last block's end, or more
    match: TierMatch  # blocks to load; memory has the tokens before them
    on_batch: Callable[[BlockLoad], None]  # takes the loaded blocks, so that memory for more is free
    on_done: Callable[[BlockLoad], None] = lambda _: None  # all blocks were loaded, or no more will be
    began_s: float = 0.0
    lease: Lease | None = None  # on the prefix before the blocks, and on the blocks that were inserted
    blocks: list[Arrays] = field(default_factory=list)  # loaded and not taken yet
    nbytes: int = 0  # of `blocks`
    num_taken: int = 0
    checkpoint: Checkpoint | None = None
    reading: BlockReading | None = None
    source: BlockLoader | None = None
    is_done: bool = False
    lacked_memory: bool = False  # it ended because its blocks did not fit, or its prefix was evicted

    @property
    def links(self) -> tuple[ChainLink, ...]:
        return self.match.links

    @property
    def has_arrived(self) -> bool:
        """Whether the tier has read blocks that the engine thread has not unpacked yet."""
        return self.source is not None and self.source.has_arrived

    @property
    def num_arrived(self) -> int:
        return self.num_taken + len(self.blocks)

    @property
    def is_complete(self) -> bool:
        return self.num_arrived == len(self.links)

    @property
    def num_loaded_tokens(self) -> int:
        return self.links[self.num_arrived - 1].end - self.links[0].start if self.num_arrived else 0

    @property
    def num_tokens(self) -> int:
        return self.links[-1].end - self.links[0].start

    def take_blocks(self) -> LoadedBlocks:
        """Take the blocks that were loaded since the last call."""
        links = self.links[self.num_taken : self.num_arrived]
        batch = (
            LoadedBlocks(tuple(self.blocks), links, links[0].start, links[-1].end)
            if links
            else LoadedBlocks((), (), 0, 0)
        )
        self.num_taken += len(self.blocks)
        self.blocks, self.nbytes = [], 0
        return batch

    def deadline_s(self, prefill_tokens_s: float) -> float:
        """Return when the load falls behind computing, given its blocks so far; infinite for an unknown speed (0)."""
        if not prefill_tokens_s:
            return math.inf
        compute_s = self.num_tokens / prefill_tokens_s
        patience_s = max(LATE_SHARE * compute_s, min(MIN_PATIENCE_S, MAX_PATIENCE * compute_s))
        return self.began_s + self.num_loaded_tokens / prefill_tokens_s + patience_s


class BlockLoader:
    """Loads blocks of one tier: the tier's threads read bytes, `run` unpacks them on the thread that owns MLX.

    A thread of the tier calls `wake` when it has read a block; `run` should be called soon after. Loads together hold
    at most `bound_bytes` of unpacked blocks that their owners have not taken.
    """

    def __init__(
        self, tier: Tier, layout: Layout, *, wake: Callable[[], None], bound_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._tier = tier
        self._layout = layout
        self._wake = wake
        self._bound_bytes = bound_bytes
        self._clock = clock
        self._arrived: deque[tuple[BlockLoad, LoadedBlock | MissingBlock]] = deque()  # filled by the tier's threads
        self._active: dict[BlockLoad, None] = {}
        self.num_unreadable = 0  # blocks with a valid checksum that could not be unpacked

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived)

    @property
    def unused_bytes(self) -> int:
        """Bytes of unpacked blocks that no load's owner has taken yet."""
        return sum(load.nbytes for load in self._active)

    def begin_load(self, load: BlockLoad) -> None:
        load.began_s = self._clock()
        load.source = self
        links, checkpoint_bytes = load.links, load.match.mark_bytes
        block_ids, sizes = [BlockId(link.key) for link in links], [link.nbytes for link in links]
        if checkpoint_bytes:
            # The checkpoint is read first: without it the blocks are of no use.
            block_ids.insert(0, BlockId(links[-1].key, CHECKPOINT))
            sizes.insert(0, checkpoint_bytes)
        load.reading = self._tier.read(
            block_ids, lambda result: self._receive_block(load, result), root=load.root, sizes=sizes
        )
        self._active[load] = None

    def expected_seconds(self, match: TierMatch) -> float:
        """Return the expected time to read the blocks of a match."""
        return self._tier.rates.seconds_for(sum(match.sizes), len(match.sizes))

    def cancel_load(self, load: BlockLoad) -> None:
        if load.reading is not None:
            load.reading.cancel()
        self._end_load(load)

    def cancel_all(self) -> None:
        """Cancel all loads: the engine core that they belong to is gone."""
        for load in list(self._active):
            self.cancel_load(load)

    def run(self, slice_s: float) -> None:
        """Unpack at least one block, and more while the time slice lasts."""
        until_s = time.monotonic() + slice_s
        while self._arrived:
            load, result = self._arrived.popleft()
            self._unpack_result(load, result)
            if time.monotonic() >= until_s:
                return

    def _receive_block(self, load: BlockLoad, result: LoadedBlock | MissingBlock) -> None:
        """Queue a result of the tier; called on a thread of the tier."""
        self._arrived.append((load, result))
        self._wake()

    def _unpack_result(self, load: BlockLoad, result: LoadedBlock | MissingBlock) -> None:
        try:
            if load.is_done:
                return
            if isinstance(result, MissingBlock):
                self._fail_load(load)
                return
            self._reclaim_for(result.block.nbytes)
            if not load.is_done:  # an owner that finds no memory for its blocks cancels its load
                self._add_block(load, result.block)
        finally:
            result.release()

    def _add_block(self, load: BlockLoad, block: Block) -> None:
        try:
            if block.part == CHECKPOINT:
                load.checkpoint = unpack_checkpoint(block.content)
                return
            start, end = block.start, block.start + block.num_tokens
            load.blocks.append(unpack(self._layout, block.content, start, end))
        except Exception as error:
            # Verified bytes that this version cannot read are a miss, whatever the reason, and never fail a request.
            self.num_unreadable += 1
            log.exception("a block of the cache cannot be read by this version")
            if isinstance(error, ConfigError):
                # The unreadable block would keep a readable one of the same tokens off the tier.
                self._tier.remove([block.id])
            self._fail_load(load)
            return
        load.nbytes += block.nbytes
        if load.is_complete:
            self._end_load(load)
            load.on_done(load)

    def _reclaim_for(self, nbytes: int) -> None:
        """Have all owners take their blocks if one more block of this size would exceed the bound."""
        if self.unused_bytes + nbytes <= self._bound_bytes:
            return
        for other in list(self._active):
            if other.blocks:
                other.on_batch(other)

    def _fail_load(self, load: BlockLoad) -> None:
        self.cancel_load(load)
        load.on_done(load)

    def _end_load(self, load: BlockLoad) -> None:
        load.is_done = True
        self._active.pop(load, None)


class PinnedBlocks:
    """Blocks that pins keep on a tier.

    The tier reads `keys` on a thread of its own before it evicts a block. Chains are looked up on one thread and
    written on another, so a lock guards all changes.
    """

    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys
        self._lock = threading.Lock()  # guards `_by_pin`, `_num_pins` and changes of `_keys`
        self._by_pin: dict[Hashable, set[bytes]] = {}
        self._num_pins: Counter[bytes] = Counter()  # of each block

    def begin_pin(self, pin: Hashable) -> None:
        """Accept blocks for a pin from now on."""
        with self._lock:
            self._by_pin.setdefault(pin, set())

    def pin_blocks(self, pins: Iterable[Hashable], keys: Iterable[bytes]) -> None:
        """Pin blocks for those of the pins that have not ended."""
        with self._lock:
            open_pins = [self._by_pin[pin] for pin in pins if pin in self._by_pin]
            for key in keys if open_pins else ():
                for pinned_keys in open_pins:
                    self._num_pins[key] += key not in pinned_keys
                    pinned_keys.add(key)
                self._keys.add(key)

    def end_pins(self, pins: Iterable[Hashable]) -> None:
        """End pins, and unpin the blocks that no other pin keeps."""
        with self._lock:
            for pin in pins:
                for key in self._by_pin.pop(pin, ()):
                    self._num_pins[key] -= 1
                    if not self._num_pins[key]:
                        del self._num_pins[key]
                        self._keys.discard(key)


T = TypeVar("T")

Post = Callable[[Callable[[], None]], None]  # runs a function on the thread that owns MLX, soon


@dataclass(frozen=True)
class TierRun:
    """A run of tokens on a tier, in one precision."""

    end: int
    precision: str  # several are joined with a plus; empty: the tier cannot tell
    nbytes: int


class TierClient:
    """Lookups, pins and block loads of one tier.

    `post` wakes the engine thread. `pinned` has the keys of pinned blocks; the tier reads the set on a thread of its
    own before it evicts. `patience_s` limits how long a request may wait until evicted entries are on the tier; with 0
    no request waits.
    """

    def __init__(
        self,
        tier: Tier,
        layout: Layout,
        *,
        post: Post,
        pinned: set[bytes] | None = None,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.patience_s = patience_s
        self._pinned = PinnedBlocks(set[bytes]() if pinned is None else pinned)
        self._needs_checkpoints = needs_checkpoints(layout)
        self._wake = lambda: post(_wake_up)
        tier.on_room = self._wake
        # Half of the bytes that are read ahead wait in the tier, the other half in the loader.
        self.loader = BlockLoader(tier, layout, wake=self._wake, bound_bytes=tier.read_ahead_bytes, clock=clock)

    @property
    def has_tier(self) -> bool:
        """Whether there is a tier; without one, evicted tokens are lost."""
        return self.tier.limit_bytes > 0

    @property
    def is_working(self) -> bool:
        """Whether the tier writes what it accepts within `patience_s`, so that waiting for it pays."""
        return self.tier.write_state().is_working(self.patience_s)

    def touch_blocks(self, links: Iterable[ChainLink]) -> None:
        """Record a use of blocks now, whether or not they were read."""
        parts = (BASE, CHECKPOINT) if self._needs_checkpoints else (BASE,)
        self.tier.touch(BlockId(link.key, part) for link in links for part in parts)

    # Pins.

    def pin_chain(self, pin: Hashable, root: bytes, ids: TokenIds, *, instead_of: Sequence[Hashable] = ()) -> None:
        """Pin the blocks of these tokens as soon as they have been looked up, and end other pins after that. Blocks
        that are written later are pinned with `pin_written_block`."""
        if not self.has_tier:
            return
        self._pinned.begin_pin(pin)
        self.start_lookup(self._pin_walk(pin, root, ids, tuple(instead_of)), None)

    def _pin_walk(self, pin: Hashable, root: bytes, ids: TokenIds, instead_of: Sequence[Hashable]) -> Walk[None]:
        try:
            match = yield from self.tier.blocks.longest_chain(root, 0, ids)
            self._pinned.pin_blocks([pin], [link.key for link in match.links])
        finally:
            # The old pins end last: a block that both keep is never without a pin.
            self._pinned.end_pins(instead_of)

    def pin_written_block(self, pins: Iterable[Hashable], key: bytes) -> None:
        """Pin a block that was written for an entry with these pins."""
        self._pinned.pin_blocks(pins, [key])

    def unpin_chains(self, pins: Iterable[Hashable]) -> None:
        """End pins: their blocks may be evicted, unless another pin keeps them."""
        self._pinned.end_pins(pins)

    # Lookups.

    def start_lookup(self, walk: Walk[T], otherwise: T) -> Lookup[T]:
        """Run a walk on a thread of the tier, and wake the engine thread at its end. The answer is `otherwise` until
        then, and for good where there is no tier or the walk fails."""
        return self.tier.start_lookup(walk, otherwise, self._wake)

    def find_chain(self, root: bytes, ids: TokenIds) -> Lookup[TierMatch]:
        """Look up the longest chain that a sequence with these tokens can resume from. Its blocks count as used, even
        where memory has the tokens: blocks of frequent prompts must not be the first that the tier evicts."""
        return self.start_lookup(self._find_walk(root, ids), TierMatch())

    def describe_prefix(self, root: bytes, ids: TokenIds) -> Lookup[PromptOnTier | None]:
        """Look up how much of a prompt the tier has."""
        return self.start_lookup(self.tier.blocks.describe_prompt(root, ids, at_marks=self._needs_checkpoints), None)

    def count_usable(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Lookup[tuple[int, ...]]:
        """Count the tokens of each chain that a sequence can resume from. No block counts as used."""
        return self.start_lookup(self._count_walk(tuple(chains)), ())

    def locate_runs(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Lookup[tuple[tuple[TierRun, ...], ...]]:
        """Look up the runs of equal precision of each chain. No block counts as used."""
        return self.start_lookup(self._runs_walk(tuple(chains)), ())

    def drop_chain(self, root: bytes, ids: TokenIds, start: int, *, is_dry: bool) -> Lookup[Removed]:
        """Remove the blocks of these tokens that begin at `start` or later, from the last one back to the first that
        has another child. `is_dry`: only count them."""
        return self.start_lookup(self._drop_walk(root, ids, start, is_dry=is_dry), Removed())

    def find_whole_chain(self, leaf: Node[Entry], *, with_checkpoint: bool) -> Lookup[tuple[ChainLink, ...]]:
        """Look up the blocks of all tokens up to a leaf's end, however they are cut; none where one is missing."""
        return self.start_lookup(self._whole_walk(leaf.root_key, ids_to(leaf), with_checkpoint=with_checkpoint), ())

    def longest_chain(self, root: bytes, ids: TokenIds) -> Walk[TierMatch]:
        """Walk the longest chain of blocks that begins these tokens and that a sequence can resume from."""
        return self.tier.blocks.longest_chain(root, 0, ids, at_marks=self._needs_checkpoints)

    def _find_walk(self, root: bytes, ids: TokenIds) -> Walk[TierMatch]:
        match = yield from self.longest_chain(root, ids)
        self.touch_blocks(match.links)
        return match

    def _count_walk(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Walk[tuple[int, ...]]:
        counts: list[int] = []
        for root, ids in chains:
            counts.append((yield from self.longest_chain(root, ids)).num_tokens)
        return tuple(counts)

    def _runs_walk(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Walk[tuple[tuple[TierRun, ...], ...]]:
        runs_of_chains: list[tuple[TierRun, ...]] = []
        for root, ids in chains:
            runs: list[TierRun] = []
            for link in (yield from self.longest_chain(root, ids)).links:
                precisions = bytes_by_precision(self.tier.blocks.contents(BlockId(link.key)))
                precision = "+".join(sorted(precisions))
                extends_run = bool(runs) and runs[-1].precision == precision
                runs.append(TierRun(link.end, precision, link.nbytes + (runs.pop().nbytes if extends_run else 0)))
            runs_of_chains.append(tuple(runs))
        return tuple(runs_of_chains)

    def _drop_walk(self, root: bytes, ids: TokenIds, start: int, *, is_dry: bool) -> Walk[Removed]:
        links = (yield from self.tier.blocks.longest_chain(root, 0, ids)).links
        dropped: list[ChainLink] = []
        for link in reversed(links):
            if link.start < start or self.tier.blocks.num_children(link.key) > bool(dropped):
                break
            dropped.append(link)
        if not is_dry:
            self.tier.remove([BlockId(link.key, part) for link in dropped for part in (CHECKPOINT, BASE)], durable=True)
        num_tokens = sum(link.end - link.start for link in dropped)
        return Removed(len(dropped), num_tokens, sum(link.nbytes for link in dropped))

    def _whole_walk(self, root: bytes, ids: TokenIds, *, with_checkpoint: bool) -> Walk[tuple[ChainLink, ...]]:
        links = (yield from self.tier.blocks.longest_chain(root, 0, ids)).links
        is_whole = bool(links) and links[-1].end == len(ids)
        if is_whole and with_checkpoint:
            is_whole = self.tier.blocks.find(links[-1].key, CHECKPOINT) > 0
        return links if is_whole else ()


def without_tier(layout: Layout) -> TierClient:
    """Return a client of a tier that has nothing and takes nothing."""
    return TierClient(NoTier(), layout, post=lambda _: None, patience_s=0.0)


def _wake_up() -> None:
    """Do nothing: receiving the call is enough to wake the engine thread."""


def make_block(link: ChainLink, ids: TokenIds, root: bytes, content: BlockContent, part: str) -> Block:
    token_ids = ids[link.start : link.end].astype("<i4", copy=False).tobytes()
    return Block(link.key, link.parent, root, link.start, token_ids, content.tensors, content.description, part)


def ids_to(leaf: Node[Entry]) -> TokenIds:
    """Return all tokens from the root to a leaf's end."""
    return np.concatenate([node.tokens for node in leaf.path()])


def entry_at(leaf: Node[Entry], position: int) -> tuple[Entry, int]:
    """Return the entry that has a token on the path to a leaf, and the end of that entry's tokens."""
    path = leaf.path()
    entry = next(node.payload for node in path if node.start <= position < node.end)
    return entry, max(node.end for node in path if node.payload is entry)


def first_live_entry(leaf: Node[Entry]) -> Entry | None:
    """Return the first entry on the path to a leaf whose KV is still in its owner's KV buffer."""
    return next((node.payload for node in leaf.path() if node.payload.span.is_live), None)
