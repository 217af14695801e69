"""Between what is in memory and blocks on a disk: what goes there, what is found there, and the way back.

A conversation is a chain of blocks, each named by its tokens and all that comes before. Whatever is written, all that
it hangs on is written first, so that every block on the disk can be reached from the first token. Arrays become bytes
here, on the thread that owns MLX; the tier's threads see bytes only. Chains are looked up on a thread of the tier: the
thread that owns MLX asks, goes on, and is woken when the answer is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvstrata.index.ids import TokenIds
from kvstrata.index.keys import chain
from kvstrata.index.tree import Node
from kvstrata.layers.kinds import Layout
from kvstrata.spans.blocks import Packed, boundaries, pack_mark, packing
from kvstrata.spans.contents import PRECISION, by_label
from kvstrata.spans.marks import needs_marks
from kvstrata.store.cold.loads import Loads
from kvstrata.store.cold.pinned import PinnedBlocks
from kvstrata.store.entry import STEPPED_DOWN, Entry
from kvstrata.tier.base import Refusal, Refused, Removed, Tier
from kvstrata.tier.block import BASE, MARK, Block, BlockId, Tensor
from kvstrata.tier.chains import Link, OnDisk, TierMatch
from kvstrata.tier.lookups import Lookup, Walk
from kvstrata.tier.nothing import NoTier

# Of a chain that is looked up, in one step: about a millisecond.
STEPS_AT_ONCE = 8

T = TypeVar("T")
UnusedS = Callable[[Entry], float]  # how long ago a request last went on from an entry
RecordBlock = Callable[[Entry, bytes], None]  # a block with this key has tokens of an entry
Post = Callable[[Callable[[], None]], None]  # run something on the thread that owns MLX, soon


@dataclass(frozen=True)
class Spilled:
    is_whole: bool  # the disk has all of it, or took it
    refused: Refused | None = None  # what it said where it did not; None: a block before was given up, or removed
    token_bytes: float = 0.0  # of the last span, as it is on the disk
    end: int = 0  # of the tokens that it has, or took


@dataclass(frozen=True)
class Lying:
    """A run of tokens on a tier, in one precision."""

    end: int
    precision: str  # several with a plus between; empty: the tier cannot tell
    nbytes: int


class NotTaken(Exception):
    """Raised and caught inside this module: a spill ends here."""

    def __init__(self, refused: Refused | None = None) -> None:
        super().__init__(refused)
        self.refused = refused


class Cold:
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
        self.loads = Loads(tier, layout, wake=self._wake, bound_bytes=tier.read_ahead_bytes, clock=clock)

    @property
    def has_tier(self) -> bool:
        """False: what memory lets go is gone."""
        return self.tier.limit_bytes > 0

    # Out.

    @property
    def is_working(self) -> bool:
        """Whether it is worth waiting for: what is given to the disk gets there."""
        return self.tier.writing().is_working(self.patience_s)

    def spill(
        self,
        leaf: Node[Entry],
        *,
        puts_away: bool = False,
        unused_s: UnusedS = lambda _: 0.0,
        record: RecordBlock = lambda *_: None,
        was_short: Callable[[Entry], bool] = lambda _: False,
    ) -> Generator[None, None, Spilled]:
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
        except NotTaken as end:
            return Spilled(is_whole=False, refused=end.refused, end=start)
        return Spilled(is_whole=True, token_bytes=own_bytes / max(1, own_tokens), end=start)

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
            raise NotTaken  # it was taken, and has been given up since
        asked_twice = link.end <= entry.asked_twice
        block = make_block(link, ids, leaf.root_key, packed, BASE)
        self._offer(block, asked_twice=asked_twice, replace=replace, unused_s=unused_s(entry))

    def _put_mark(self, link: Link, leaf: Node[Entry], ids: TokenIds, unused_s: UnusedS) -> None:
        """Where there is one, and the disk has only its block."""
        if not self.tier.blocks.find(link.key):
            raise NotTaken
        entry, _ = holder_of(leaf, link.end - 1)
        if entry.is_pinned:
            self._pinned.keep(entry.pins, [link.key])
        mark = entry.span.marks.get(link.end)
        if mark is not None and not self.tier.blocks.find(link.key, MARK):
            # Where its block was worth it, it is.
            block = make_block(link, ids, leaf.root_key, pack_mark(mark), MARK)
            self._offer(block, asked_twice=True, replace=False, unused_s=unused_s(entry))

    def _offer(self, block: Block, *, asked_twice: bool, replace: bool, unused_s: float) -> None:
        answer = self.tier.put(block, asked_twice=asked_twice, replace=replace, unused_s=unused_s)
        if isinstance(answer, Refused) and answer.reason is not Refusal.PRESENT:
            raise NotTaken(answer)

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

    def touch(self, steps: Iterable[Link]) -> None:
        """These count as used now, wherever they came from."""
        parts = (BASE, MARK) if self._needs_marks else (BASE,)
        self.tier.touch(BlockId(link.key, part) for link in steps for part in parts)

    def pin(self, pin: Hashable, root: bytes, ids: TokenIds, *, instead_of: Sequence[Hashable] = ()) -> None:
        """What the disk has of these tokens under this root stays there, as soon as it has been looked up: then other
        pins end. What comes to it later is pinned as it comes."""
        if not self.has_tier:
            return
        self._pinned.begin(pin)
        self.ask(self._pin(pin, root, ids, tuple(instead_of)), None)

    def _pin(self, pin: Hashable, root: bytes, ids: TokenIds, instead_of: Sequence[Hashable]) -> Walk[None]:
        try:
            match = yield from self.tier.blocks.longest(root, 0, ids)
            self._pinned.keep([pin], [link.key for link in match.links])
        finally:
            # Not before: what both keep is never without a pin, whenever the tier asks.
            self._pinned.end(instead_of)

    def unpin(self, pins: Iterable[Hashable]) -> None:
        """What the disk has for these need not stay there, unless another pin keeps it."""
        self._pinned.end(pins)

    # Found.

    def look(self, root: bytes, ids: TokenIds) -> Lookup[TierMatch]:
        """Ask for the longest chain that a sequence with these tokens can go on from. It counts as used, wherever the
        sequence gets them: what is asked for often is not to be the first that leaves the disk."""
        return self.ask(self._look(root, ids), TierMatch())

    def about(self, root: bytes, ids: TokenIds) -> Lookup[OnDisk | None]:
        """The answer is None until there is one, and for good without a tier."""
        return self.ask(self.tier.blocks.about(root, ids, at_marks=self._needs_marks), None)

    def reach(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Lookup[tuple[int, ...]]:
        """How many tokens of each chain a sequence could go on from. Nothing counts as used. The answer is empty until
        there is one, and for good without a tier."""
        return self.ask(self._reach(tuple(chains)), ())

    def lie(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Lookup[tuple[tuple[Lying, ...], ...]]:
        """Likewise, in which runs they lie there."""
        return self.ask(self._lie(tuple(chains)), ())

    def drop(self, root: bytes, ids: TokenIds, start: int, *, is_dry: bool) -> Lookup[Removed]:
        """Remove the blocks of these tokens that begin at `start` or later, from the last one on, as far as no other
        block hangs on them; or only tell what would go."""
        return self.ask(self._drop(root, ids, start, is_dry=is_dry), Removed())

    def blocks_to(self, leaf: Node[Entry], *, with_mark: bool) -> Lookup[tuple[Link, ...]]:
        """The blocks of all tokens up to a leaf's end, however they were cut; none where the disk has not all of it."""
        return self.ask(self._whole(leaf.root_key, ids_to(leaf), with_mark=with_mark), ())

    def _reach(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Walk[tuple[int, ...]]:
        found: list[int] = []
        for root, ids in chains:
            found.append((yield from self.longest(root, ids)).num_tokens)
        return tuple(found)

    def _lie(self, chains: Sequence[tuple[bytes, TokenIds]]) -> Walk[tuple[tuple[Lying, ...], ...]]:
        found: list[tuple[Lying, ...]] = []
        for root, ids in chains:
            runs: list[Lying] = []
            for link in (yield from self.longest(root, ids)).links:
                names = by_label(self.tier.blocks.contents(BlockId(link.key)), PRECISION)
                precision = "+".join(sorted(names))
                goes_on = bool(runs) and runs[-1].precision == precision
                runs.append(Lying(link.end, precision, link.nbytes + (runs.pop().nbytes if goes_on else 0)))
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

    def longest(self, root: bytes, ids: TokenIds) -> Walk[TierMatch]:
        """The longest chain of blocks that begins these tokens, and that a sequence can go on from."""
        return self.tier.blocks.longest(root, 0, ids, at_marks=self._needs_marks)

    def _look(self, root: bytes, ids: TokenIds) -> Walk[TierMatch]:
        match = yield from self.longest(root, ids)
        self.touch(match.links)
        return match

    def ask(self, walk: Walk[T], otherwise: T) -> Lookup[T]:
        """Have a walk done on a thread of the tier, and the engine's woken when it is."""
        return self.tier.look(walk, otherwise, self._wake)


def no_cold(layout: Layout) -> Cold:
    """Of a store without a tier."""
    return Cold(NoTier(), layout, post=lambda _: None, patience_s=0.0)


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
