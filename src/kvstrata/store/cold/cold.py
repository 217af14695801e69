"""Between what is in memory and blocks on a disk: what goes there, what is found there, and the way back.

A conversation is a chain of blocks, each named by its tokens and all that comes before. Whatever is written, all that
it hangs on is written first, so that every block on the disk can be reached from the first token. Arrays become bytes
here, on the thread that owns MLX; the tier's threads see bytes only. Chains are looked up on a thread of the tier: the
thread that owns MLX asks, goes on, and is woken when the answer is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvstrata.disk.block import BASE, Block, BlockId, Tensor
from kvstrata.disk.lookups import Lookup
from kvstrata.disk.reasons import Refusal
from kvstrata.disk.tier import DiskTier, Refused
from kvstrata.index.ids import TokenIds
from kvstrata.index.keys import chain
from kvstrata.index.tree import Node
from kvstrata.layers.kinds import Layout
from kvstrata.spans.blocks import Packed, boundaries, pack_mark, packing
from kvstrata.spans.contents import PRECISION, by_label
from kvstrata.spans.marks import needs_marks
from kvstrata.store.cold.chains import MARK, Chains, ColdMatch, OnDisk, Step, Walk
from kvstrata.store.cold.loads import Load, Loads
from kvstrata.store.entry import STEPPED_DOWN, Entry

# Of a chain that is looked up, in one step: about a millisecond.
STEPS_AT_ONCE = 8

T = TypeVar("T")
UnusedS = Callable[[Entry], float]  # how long ago a request last went on from an entry
Post = Callable[[Callable[[], None]], None]  # run something on the thread that owns MLX, soon


@dataclass(frozen=True)
class Spilled:
    is_whole: bool  # the disk has all of it, or took it
    refused: Refused | None = None  # what it said where it did not; None: a block before was given up, or removed
    token_bytes: float = 0.0  # of the last span, as it is on the disk
    end: int = 0  # of the tokens that it has, or took


class NotTaken(Exception):
    """Raised and caught inside this module: a spill ends here."""

    def __init__(self, refused: Refused | None = None) -> None:
        super().__init__(refused)
        self.refused = refused


class Cold:
    def __init__(
        self,
        tier: DiskTier,
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
        self._pinned = set[bytes]() if pinned is None else pinned
        self._pinned_lately = set[bytes]()  # since pins were last looked up
        self._layout = layout
        self._needs_marks = needs_marks(layout)
        self._wake = lambda: post(_nothing)
        self.chains = Chains(tier, needs_marks=self._needs_marks)
        # Half of what may be ahead waits in the tier, half here.
        half_bytes = tier.read_ahead_bytes
        self.loads = Loads(tier, layout, wake=self._wake, bound_bytes=half_bytes, clock=clock)

    # Out.

    @property
    def is_working(self) -> bool:
        """Whether it is worth waiting for: what is given to the disk gets there."""
        return self.tier.is_working(self.patience_s)

    def spill(
        self,
        leaf: Node[Entry],
        *,
        puts_away: bool = False,
        unused_s: UnusedS = lambda _: 0.0,
    ) -> Generator[None, None, Spilled]:
        """Write what the disk has not of the tokens up to a leaf's end, in small steps; after the first block that is
        not taken, nothing could be reached. Spans may be joined meanwhile; before each step the caller checks that the
        leaf is still there, and as long as it was. `puts_away`: also what the disk has in fewer bits of the last span.
        `unused_s`: how long ago a request last went on from an entry; what expires counts from there.

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
                for step in present or (_next_step(leaf, key, start, ids),):
                    is_better = puts_away and step.start >= own and self._is_lower(step, leaf)
                    if is_better or not present:
                        yield from self._put(step, leaf, ids, unused_s, replace=is_better)
                    self._put_mark(step, leaf, ids, unused_s)
                    if step.start >= own:
                        own_bytes += self._held_bytes(step)
                        own_tokens += step.end - step.start
                    key, start = step.key, step.end
                    yield
        except NotTaken as end:
            return Spilled(is_whole=False, refused=end.refused, end=start)
        return Spilled(is_whole=True, token_bytes=own_bytes / max(1, own_tokens), end=start)

    def _walk(self, key: bytes, start: int, ids: TokenIds) -> Generator[None, None, tuple[Step, ...]]:
        """The longest chain that is there, in small steps."""
        walk, number = self.chains.longest(key, start, ids), 0
        while True:
            try:
                next(walk)
            except StopIteration as end:
                return end.value.steps
            number += 1
            if number % STEPS_AT_ONCE == 0:
                yield

    def _put(
        self, step: Step, leaf: Node[Entry], ids: TokenIds, unused_s: UnusedS, *, replace: bool
    ) -> Generator[None, None, None]:
        entry, _ = _holder(leaf, step.start)
        packed = yield from packing(entry.span, step.start, step.end)
        if step.start and not self.tier.find(step.parent):
            raise NotTaken  # it was taken, and has been given up since
        asked_twice = step.end <= entry.asked_twice
        block = _block(step, ids, leaf.root_key, packed, BASE)
        self._offer(block, asked_twice=asked_twice, replace=replace, unused_s=unused_s(entry))

    def _put_mark(self, step: Step, leaf: Node[Entry], ids: TokenIds, unused_s: UnusedS) -> None:
        """Where there is one, and the disk has only its block."""
        if not self.tier.find(step.key):
            raise NotTaken
        entry, _ = _holder(leaf, step.end - 1)
        if entry.is_pinned:
            self._pinned_lately.add(step.key)
            self._pinned.add(step.key)
        mark = entry.span.marks.get(step.end)
        if mark is not None and not self.tier.find(step.key, MARK):
            # Where its block was worth it, it is.
            block = _block(step, ids, leaf.root_key, pack_mark(mark), MARK)
            self._offer(block, asked_twice=True, replace=False, unused_s=unused_s(entry))

    def _offer(self, block: Block, *, asked_twice: bool, replace: bool, unused_s: float) -> None:
        answer = self.tier.put(block, asked_twice=asked_twice, replace=replace, unused_s=unused_s)
        if isinstance(answer, Refused) and answer.reason is not Refusal.PRESENT:
            raise NotTaken(answer)

    def _is_lower(self, step: Step, leaf: Node[Entry]) -> bool:
        """Whether a block that is there has fewer bits than memory, and can be made anew."""
        entry, last = _holder(leaf, step.start)
        span = entry.span
        in_memory = span.kv_bytes * (step.end - step.start) / max(1, span.num_tokens)
        if step.end > last or self._held_bytes(step) >= STEPPED_DOWN * in_memory:
            return False
        return all(len(span.parts(layer, step.start, step.end)) == 1 for layer in span.layers)

    def _held_bytes(self, step: Step) -> int:
        """Of a block's arrays, as it is on the disk."""
        return sum(by_label(self.tier.contents(BlockId(step.key)), PRECISION).values())

    def touch(self, steps: Iterable[Step]) -> None:
        """These count as used now, wherever they came from."""
        parts = (BASE, MARK) if self._needs_marks else (BASE,)
        self.tier.touch(BlockId(step.key, part) for step in steps for part in parts)

    def pin(self, chains: Iterable[tuple[bytes, TokenIds]]) -> None:
        """What the disk has of these tokens under these roots stays there, and nothing else: as soon as it has been
        looked up. What comes to it later is pinned as it comes."""
        self._pinned_lately = lately = set[bytes]()
        self._ask(self._pin(tuple(chains), lately), None)

    def _pin(self, chains: Sequence[tuple[bytes, TokenIds]], lately: set[bytes]) -> Walk[None]:
        pinned = set[bytes]()
        for root, ids in chains:
            pinned.update(step.key for step in (yield from self.chains.longest(root, 0, ids)).steps)
        # Never without what stays pinned, whenever the tier asks.
        self._pinned |= pinned | lately
        self._pinned &= pinned | lately

    # Found.

    def look(self, root: bytes, ids: TokenIds) -> Lookup[ColdMatch]:
        """Ask for the longest chain that a sequence with these tokens can go on from. It counts as used, wherever the
        sequence gets them: what is asked for often is not to be the first that leaves the disk."""
        return self._ask(self._look(root, ids), ColdMatch())

    def about(self, root: bytes, ids: TokenIds) -> Lookup[OnDisk]:
        return self._ask(self.chains.about(root, ids), OnDisk())

    def blocks_to(self, leaf: Node[Entry], *, with_mark: bool) -> Lookup[tuple[Step, ...]]:
        """The blocks of all tokens up to a leaf's end, however they were cut; none where the disk has not all of it."""
        return self._ask(self.chains.whole(leaf.root_key, ids_to(leaf), with_mark=with_mark), ())

    def _look(self, root: bytes, ids: TokenIds) -> Walk[ColdMatch]:
        match = yield from self.chains.match(root, ids)
        self.touch(match.steps)
        return match

    def _ask(self, walk: Walk[T], otherwise: T) -> Lookup[T]:
        return self.tier.look(walk, otherwise, self._wake)

    # Back.

    def load(
        self,
        root: bytes,
        salt: str,
        ids: TokenIds,
        match: ColdMatch,
        known_tokens: int,
        *,
        on_batch: Callable[[Load], None],
        on_done: Callable[[Load], None] = lambda _: None,
    ) -> Load:
        """Begin to read what follows `known_tokens`. `on_batch` is called when what has come should be taken, to make
        room for more, `on_done` when all is there, or no more will come."""
        steps = [step for step in match.steps if step.end > known_tokens]
        return self.loads.begin(
            root,
            salt,
            ids[: match.num_tokens],
            steps,
            mark_bytes=match.mark_bytes,
            on_done=on_done,
            on_batch=on_batch,
        )

    def seconds_to_load(self, match: ColdMatch, known_tokens: int) -> float:
        """What reading the blocks of what follows `known_tokens` is expected to take."""
        sizes = [step.nbytes for step in match.steps if step.end > known_tokens]
        if match.mark_bytes:
            sizes.append(match.mark_bytes)
        return self.tier.rates.seconds_for(sum(sizes), len(sizes))

    def give_up(self, load: Load) -> None:
        self.loads.give_up(load)


def _nothing() -> None:
    return


def _block(step: Step, ids: TokenIds, root: bytes, packed: Packed, part: str) -> Block:
    tensors = {name: Tensor(a.dtype, a.shape, a.octets) for name, a in packed.arrays.items()}
    token_ids = ids[step.start : step.end].astype("<i4", copy=False).tobytes()
    return Block(step.key, step.parent, root, step.start, token_ids, tensors, packed.description, part)


def ids_to(leaf: Node[Entry]) -> TokenIds:
    return np.concatenate([node.tokens for node in leaf.path()])


def _holder(leaf: Node[Entry], at: int) -> tuple[Entry, int]:
    """Whose a token is, on the way to a leaf, and where that one's tokens end."""
    path = leaf.path()
    entry = next(node.payload for node in path if node.start <= at < node.end)
    return entry, max(node.end for node in path if node.payload is entry)


def _next_step(leaf: Node[Entry], parent: bytes, start: int, ids: TokenIds) -> Step:
    """A block that is not there yet."""
    entry, last = _holder(leaf, start)
    end = boundaries(entry.span, start, last)[0]
    return Step(chain(parent, ids[start:end]), parent, start, end)
