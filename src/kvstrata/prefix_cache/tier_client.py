"""Between the cache and one tier: lookups, pins, block loads.

A conversation is a chain of blocks. The key of a block hashes its tokens and everything before them, and parents are
written first, so every block can be reached from the first token. Arrays become bytes here, on the thread that owns
MLX; tier threads see bytes only, and look up chains.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvstrata.attention.parts import SealedPart
from kvstrata.errors import ConfigError
from kvstrata.layers.kinds import Layout
from kvstrata.prefix_cache.entries import STEPPED_DOWN, Entry, Lease
from kvstrata.prefix_cache.keys import TokenIds, chain
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.spans.blocks import Packed, PackedArray, boundaries, pack_mark, packing, unpack, unpack_mark
from kvstrata.spans.contents import PRECISION, by_label
from kvstrata.spans.marks import Mark, needs_marks
from kvstrata.tier.base import Refusal, Refused, Removed, Tier
from kvstrata.tier.block import BASE, MARK, Block, BlockId, Tensor
from kvstrata.tier.chains import Link, OnDisk, TierMatch
from kvstrata.tier.lookups import Lookup, Walk
from kvstrata.tier.nothing import NoTier
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
class LoadedBlocks:
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
    nbytes: int = 0  # of those
    num_taken: int = 0
    checkpoint: Mark | None = None
    reading: BlockReading | None = None
    source: BlockLoader | None = None  # where it comes from
    is_done: bool = False
    lacked_memory: bool = False  # it ended because memory had no room for it, or none for what it hangs on

    @property
    def links(self) -> tuple[Link, ...]:
        return self.match.links

    @property
    def has_arrived(self) -> bool:
        """Whether blocks came of which it is not known yet that they are there."""
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
        """What has come since the last time."""
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
        """When computing would have been faster, so far; 0: how fast that is is not known."""
        if not prefill_tokens_s:
            return math.inf
        compute_s = self.num_tokens / prefill_tokens_s
        patience_s = max(PATIENCE * compute_s, min(LEAST_PATIENCE_S, MOST_PATIENCE * compute_s))
        return self.began_s + self.num_loaded_tokens / prefill_tokens_s + patience_s


class BlockLoader:
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
        return sum(load.nbytes for load in self._active)

    def begin_load(self, load: BlockLoad) -> None:
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

    def expected_seconds(self, match: TierMatch) -> float:
        """What reading these blocks is expected to take."""
        return self._tier.rates.seconds_for(sum(match.sizes), len(match.sizes))

    def cancel_load(self, load: BlockLoad) -> None:
        if load.reading is not None:
            load.reading.cancel()
        self._end(load)

    def cancel_all(self) -> None:
        """Give up all loads: what they were for is gone."""
        for load in list(self._active):
            self.cancel_load(load)

    def run(self, slice_s: float) -> None:
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
                load.checkpoint = unpack_mark(_packed(came.block))
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
        load.nbytes += came.block.nbytes
        if load.is_complete:
            self._end(load)
            load.on_done(load)

    def _make_room(self, nbytes: int) -> None:
        if self.unused_bytes + nbytes <= self._bound_bytes:
            return
        for other in list(self._active):
            if other.blocks:
                other.on_batch(other)

    def _fail(self, load: BlockLoad) -> None:
        self.cancel_load(load)
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


class PinnedBlocks:
    """`keys`: what the tier asks about, on a thread of its own, before it evicts. Blocks are looked up on one thread
    and written on another, so changes are guarded by a lock."""

    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys
        self._lock = threading.Lock()  # guards the next two, and changes of the keys
        self._by_pin: dict[Hashable, set[bytes]] = {}
        self._num_pins: Counter[bytes] = Counter()  # that keep a block

    def begin_pin(self, pin: Hashable) -> None:
        """From now on blocks are kept for a pin."""
        with self._lock:
            self._by_pin.setdefault(pin, set())

    def pin_blocks(self, pins: Iterable[Hashable], keys: Iterable[bytes]) -> None:
        """Keep blocks for some pins, as far as these have not ended meanwhile."""
        with self._lock:
            kept = [self._by_pin[pin] for pin in pins if pin in self._by_pin]
            for key in keys if kept else ():
                for own in kept:
                    self._num_pins[key] += key not in own
                    own.add(key)
                self._keys.add(key)

    def end_pins(self, pins: Iterable[Hashable]) -> None:
        """Let go of what no other pin keeps."""
        with self._lock:
            for pin in pins:
                for key in self._by_pin.pop(pin, ()):
                    self._num_pins[key] -= 1
                    if not self._num_pins[key]:
                        del self._num_pins[key]
                        self._keys.discard(key)


# Of a chain that is looked up, in one step: about a millisecond.
STEPS_AT_ONCE = 8

T = TypeVar("T")

UnusedS = Callable[[Entry], float]  # how long ago a request last went on from an entry

RecordBlock = Callable[[Entry, bytes], None]  # a block with this key has tokens of an entry

Post = Callable[[Callable[[], None]], None]  # run something on the thread that owns MLX, soon


@dataclass(frozen=True)
class WrittenChain:
    is_whole: bool  # the disk has all of it, or took it
    refused: Refused | None = None  # what it said where it did not; None: a block before was given up, or removed
    token_bytes: float = 0.0  # of the last span, as it is on the disk
    end: int = 0  # of the tokens that it has, or took


@dataclass(frozen=True)
class TierRun:
    """A run of tokens on a tier, in one precision."""

    end: int
    precision: str  # several with a plus between; empty: the tier cannot tell
    nbytes: int


class NotWritten(Exception):
    """Raised and caught inside this module: a spill ends here."""

    def __init__(self, refused: Refused | None = None) -> None:
        super().__init__(refused)
        self.refused = refused


class TierClient:
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
        """`pinned`: the keys that the tier asks about on a thread of its own, before it evicts. `patience_s`: how long
        a request may wait for what memory lets go to get to the disk; 0: no request does."""
        self.tier = tier
        self.patience_s = patience_s
        tier.on_room = lambda: post(_nothing)
        self._pinned = PinnedBlocks(set[bytes]() if pinned is None else pinned)
        self._layout = layout
        self._needs_marks = needs_marks(layout)
        self._wake = lambda: post(_nothing)
        # Half of what may be ahead waits in the tier, half here.
        self.loader = BlockLoader(tier, layout, wake=self._wake, bound_bytes=tier.read_ahead_bytes, clock=clock)

    @property
    def has_tier(self) -> bool:
        """False: what memory lets go is gone."""
        return self.tier.limit_bytes > 0

    # Out.

    @property
    def is_working(self) -> bool:
        """Whether it is worth waiting for: what is given to the disk gets there."""
        return self.tier.writing().is_working(self.patience_s)

    def write_chain(
        self,
        leaf: Node[Entry],
        *,
        puts_away: bool = False,
        unused_s: UnusedS = lambda _: 0.0,
        record: RecordBlock = lambda *_: None,
        was_short: Callable[[Entry], bool] = lambda _: False,
    ) -> Generator[None, None, WrittenChain]:
        """Write what the disk has not of the tokens up to a leaf's end, in small steps; after the first block that is
        not taken, nothing could be reached. Spans may be joined meanwhile; before each step the caller checks that the
        leaf is still there, and as long as it was. `puts_away`: also what the disk has in fewer bits of the last span.
        `unused_s`: how long ago a request last went on from an entry; what expires counts from there. `record` is told
        of each block, before the tier is asked whether it is still there. `was_short`: the entries that were raw as
        long as no longer sequence went on from them; their blocks are replaced when memory has them encoded.

        What is written continues the blocks that are there, wherever those end: spans are joined, cut and loaded, marks
        come and go, and a chain made anew from what they are now would hardly be the one that was written.
        """
        ids = ids_to(leaf)
        key, start = leaf.root_key, 0
        own = leaf.payload.span.position
        own_bytes, own_tokens = 0, 0
        try:
            while start < len(ids):
                present = yield from self._walk(key, start, ids)
                for link in present or (_next_link(leaf, key, start, ids),):
                    is_better = puts_away and link.start >= own and self._is_lower(link, leaf)
                    if is_better or not present or self._is_higher(link, leaf, was_short):
                        yield from self._put(link, leaf, ids, unused_s, replace=bool(present))
                    for entry in dict.fromkeys(
                        n.payload for n in leaf.path() if n.start < link.end and n.end > link.start
                    ):
                        record(entry, link.key)
                    self._put_mark(link, leaf, ids, unused_s)
                    if link.start >= own:
                        own_bytes += self._held_bytes(link)
                        own_tokens += link.end - link.start
                    key, start = link.key, link.end
                    yield
        except NotWritten as end:
            return WrittenChain(is_whole=False, refused=end.refused, end=start)
        return WrittenChain(is_whole=True, token_bytes=own_bytes / max(1, own_tokens), end=start)

    def _walk(self, key: bytes, start: int, ids: TokenIds) -> Generator[None, None, tuple[Link, ...]]:
        """The longest chain that is there, in small steps."""
        walk, number = self.tier.blocks.longest(key, start, ids), 0
        while True:
            try:
                next(walk)
            except StopIteration as end:
                return end.value.links
            number += 1
            if number % STEPS_AT_ONCE == 0:
                yield

    def _put(
        self, link: Link, leaf: Node[Entry], ids: TokenIds, unused_s: UnusedS, *, replace: bool
    ) -> Generator[None, None, None]:
        entry, _ = holder_of(leaf, link.start)
        packed = yield from packing(entry.span, link.start, link.end)
        if link.start and not self.tier.blocks.find(link.parent):
            raise NotWritten  # it was taken, and has been given up since
        asked_twice = link.end <= entry.reused_end
        block = make_block(link, ids, leaf.root_key, packed, BASE)
        self._offer(block, asked_twice=asked_twice, replace=replace, unused_s=unused_s(entry))

    def _put_mark(self, link: Link, leaf: Node[Entry], ids: TokenIds, unused_s: UnusedS) -> None:
        """Where there is one, and the disk has only its block."""
        if not self.tier.blocks.find(link.key):
            raise NotWritten
        entry, _ = holder_of(leaf, link.end - 1)
        if entry.is_pinned:
            self._pinned.pin_blocks(entry.pins, [link.key])
        mark = entry.span.marks.get(link.end)
        if mark is not None and not self.tier.blocks.find(link.key, MARK):
            # Where its block was worth it, it is.
            block = make_block(link, ids, leaf.root_key, pack_mark(mark), MARK)
            self._offer(block, asked_twice=True, replace=False, unused_s=unused_s(entry))

    def _offer(self, block: Block, *, asked_twice: bool, replace: bool, unused_s: float) -> None:
        answer = self.tier.put(block, asked_twice=asked_twice, replace=replace, unused_s=unused_s)
        if isinstance(answer, Refused) and answer.reason is not Refusal.PRESENT:
            raise NotWritten(answer)

    def _is_lower(self, link: Link, leaf: Node[Entry]) -> bool:
        """Whether a block that is there has fewer bits than memory, and can be made anew."""
        entry, last = holder_of(leaf, link.start)
        if link.end > last or self._held_bytes(link) >= STEPPED_DOWN * self._bytes_in_memory(entry, link):
            return False
        return _is_whole(entry, link)

    def _is_higher(self, link: Link, leaf: Node[Entry], was_short: Callable[[Entry], bool]) -> bool:
        """Whether a block that is there is raw because its sequence was short, while memory has it encoded."""
        entry, last = holder_of(leaf, link.start)
        if link.end > last or not was_short(entry) or entry.span.is_live:
            return False
        return self._bytes_in_memory(entry, link) < STEPPED_DOWN * self._held_bytes(link) and _is_whole(entry, link)

    def _held_bytes(self, link: Link) -> int:
        """Of a block's arrays, as it is on the disk."""
        return sum(by_label(self.tier.blocks.contents(BlockId(link.key)), PRECISION).values())

    def _bytes_in_memory(self, entry: Entry, link: Link) -> float:
        span = entry.span
        return span.kv_bytes * (link.end - link.start) / max(1, span.num_tokens)

    def touch_blocks(self, steps: Iterable[Link]) -> None:
        """These count as used now, wherever they came from."""
        parts = (BASE, MARK) if self._needs_marks else (BASE,)
        self.tier.touch(BlockId(link.key, part) for link in steps for part in parts)

    def pin_chain(self, pin: Hashable, root: bytes, ids: TokenIds, *, instead_of: Sequence[Hashable] = ()) -> None:
        """What the disk has of these tokens under this root stays there, as soon as it has been looked up: then other
        pins end. What comes to it later is pinned as it comes."""
        if not self.has_tier:
            return
        self._pinned.begin_pin(pin)
        self.start_lookup(self._pin(pin, root, ids, tuple(instead_of)), None)

    def _pin(self, pin: Hashable, root: bytes, ids: TokenIds, instead_of: Sequence[Hashable]) -> Walk[None]:
        try:
            match = yield from self.tier.blocks.longest(root, 0, ids)
            self._pinned.pin_blocks([pin], [link.key for link in match.links])
        finally:
            # Not before: what both keep is never without a pin, whenever the tier asks.
            self._pinned.end_pins(instead_of)

    def unpin_chains(self, pins: Iterable[Hashable]) -> None:
        """What the disk has for these need not stay there, unless another pin keeps it."""
        self._pinned.end_pins(pins)

    # Found.

    def find_chain(self, root: bytes, ids: TokenIds) -> Lookup[TierMatch]:
        """Ask for the longest chain that a sequence with these tokens can go on from. It counts as used, wherever the
        sequence gets them: what is asked for often is not to be the first that leaves the disk."""
        return self.start_lookup(self._look(root, ids), TierMatch())

    def describe_prefix(self, root: bytes, ids: TokenIds) -> Lookup[OnDisk | None]:
        """The answer is None until there is one, and for good without a tier."""
        return self.start_lookup(self.tier.blocks.about(root, ids, at_marks=self._needs_marks), None)

    def count_usable(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Lookup[tuple[int, ...]]:
        """How many tokens of each chain a sequence could go on from. Nothing counts as used. The answer is empty until
        there is one, and for good without a tier."""
        return self.start_lookup(self._reach(tuple(chains)), ())

    def locate_runs(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Lookup[tuple[tuple[TierRun, ...], ...]]:
        """Likewise, in which runs they lie there."""
        return self.start_lookup(self._lie(tuple(chains)), ())

    def drop_chain(self, root: bytes, ids: TokenIds, start: int, *, is_dry: bool) -> Lookup[Removed]:
        """Remove the blocks of these tokens that begin at `start` or later, from the last one on, as far as no other
        block hangs on them; or only tell what would go."""
        return self.start_lookup(self._drop(root, ids, start, is_dry=is_dry), Removed())

    def find_whole_chain(self, leaf: Node[Entry], *, with_mark: bool) -> Lookup[tuple[Link, ...]]:
        """The blocks of all tokens up to a leaf's end, however they were cut; none where the disk has not all of it."""
        return self.start_lookup(self._whole(leaf.root_key, ids_to(leaf), with_mark=with_mark), ())

    def _reach(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Walk[tuple[int, ...]]:
        found: list[int] = []
        for root, ids in chains:
            found.append((yield from self.longest_chain(root, ids)).num_tokens)
        return tuple(found)

    def _lie(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Walk[tuple[tuple[TierRun, ...], ...]]:
        found: list[tuple[TierRun, ...]] = []
        for root, ids in chains:
            runs: list[TierRun] = []
            for link in (yield from self.longest_chain(root, ids)).links:
                names = by_label(self.tier.blocks.contents(BlockId(link.key)), PRECISION)
                precision = "+".join(sorted(names))
                goes_on = bool(runs) and runs[-1].precision == precision
                runs.append(TierRun(link.end, precision, link.nbytes + (runs.pop().nbytes if goes_on else 0)))
            found.append(tuple(runs))
        return tuple(found)

    def _drop(self, root: bytes, ids: TokenIds, start: int, *, is_dry: bool) -> Walk[Removed]:
        links = (yield from self.tier.blocks.longest(root, 0, ids)).links
        going: list[Link] = []
        for link in reversed(links):
            if link.start < start or self.tier.blocks.num_after(link.key) > bool(going):
                break
            going.append(link)
        if not is_dry:
            self.tier.remove([BlockId(link.key, part) for link in going for part in (MARK, BASE)])
        return Removed(len(going), sum(link.end - link.start for link in going), sum(link.nbytes for link in going))

    def _whole(self, root: bytes, ids: TokenIds, *, with_mark: bool) -> Walk[tuple[Link, ...]]:
        links = (yield from self.tier.blocks.longest(root, 0, ids)).links
        is_whole = bool(links) and links[-1].end == len(ids)
        if is_whole and with_mark:
            is_whole = self.tier.blocks.find(links[-1].key, MARK) > 0
        return links if is_whole else ()

    def longest_chain(self, root: bytes, ids: TokenIds) -> Walk[TierMatch]:
        """The longest chain of blocks that begins these tokens, and that a sequence can go on from."""
        return self.tier.blocks.longest(root, 0, ids, at_marks=self._needs_marks)

    def _look(self, root: bytes, ids: TokenIds) -> Walk[TierMatch]:
        match = yield from self.longest_chain(root, ids)
        self.touch_blocks(match.links)
        return match

    def start_lookup(self, walk: Walk[T], otherwise: T) -> Lookup[T]:
        """Have a walk done on a thread of the tier, and the engine's woken when it is."""
        return self.tier.look(walk, otherwise, self._wake)


def without_tier(layout: Layout) -> TierClient:
    """Of a store without a tier."""
    return TierClient(NoTier(), layout, post=lambda _: None, patience_s=0.0)


def _nothing() -> None:
    return


def make_block(link: Link, ids: TokenIds, root: bytes, packed: Packed, part: str) -> Block:
    tensors = {name: Tensor(a.dtype, a.shape, a.octets) for name, a in packed.arrays.items()}
    token_ids = ids[link.start : link.end].astype("<i4", copy=False).tobytes()
    return Block(link.key, link.parent, root, link.start, token_ids, tensors, packed.description, part)


def ids_to(leaf: Node[Entry]) -> TokenIds:
    return np.concatenate([node.tokens for node in leaf.path()])


def holder_of(leaf: Node[Entry], at: int) -> tuple[Entry, int]:
    """Whose a token is, on the way to a leaf, and where that one's tokens end."""
    path = leaf.path()
    entry = next(node.payload for node in path if node.start <= at < node.end)
    return entry, max(node.end for node in path if node.payload is entry)


def _is_whole(entry: Entry, link: Link) -> bool:
    """Whether the tokens of a block are in one piece in memory: only then can it be packed anew."""
    span = entry.span
    return all(len(span.parts(layer, link.start, link.end)) == 1 for layer in span.layers)


def _next_link(leaf: Node[Entry], parent: bytes, start: int, ids: TokenIds) -> Link:
    """A block that is not there yet."""
    entry, last = holder_of(leaf, start)
    end = boundaries(entry.span, start, last)[0]
    return Link(chain(parent, ids[start:end]), parent, start, end)
