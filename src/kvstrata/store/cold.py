"""Between what is in memory and blocks on a disk: what goes there, what is found there, and the way back.

A conversation is a chain of blocks, each named by its tokens and all that comes before. Whatever is written, all that
it hangs on is written first, so that every block on the disk can be reached from the first token. Arrays become bytes
here, on the thread that owns MLX; the tier's threads see bytes only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvstrata.index.ids import TokenIds
from kvstrata.index.keys import chain
from kvstrata.index.tree import Node
from kvstrata.layers.kinds import Layout
from kvstrata.spans.blocks import BLOCK_TOKENS, Packed, boundaries, pack_mark, packing
from kvstrata.spans.contents import PRECISION, by_label
from kvstrata.spans.marks import needs_marks
from kvstrata.store.entry import STEPPED_DOWN, Entry
from kvstrata.store.loads import MARK, Load, Loads, Step
from kvstrata.tiers.block import BASE, Block, BlockId, Tensor
from kvstrata.tiers.disk import DiskTier, Refused
from kvstrata.tiers.reasons import Refusal

# Of a chain that is looked up, in one step: about a millisecond.
STEPS_AT_ONCE = 8

UnusedS = Callable[[Entry], float]  # how long ago a request last went on from an entry
Post = Callable[[Callable[[], None]], None]  # run something on the thread that owns MLX, soon


@dataclass(frozen=True)
class ColdMatch:
    steps: tuple[Step, ...] = ()
    has_mark: bool = False  # at the end

    @property
    def num_tokens(self) -> int:
        return self.steps[-1].end if self.steps else 0


@dataclass(frozen=True)
class Spilled:
    is_whole: bool  # the disk has all of it, or took it
    refused: Refused | None = None  # what it said where it did not; None: a block before was given up, or removed
    token_bytes: float = 0.0  # of the last span, as it is on the disk


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pinned`: the keys that the tier asks about on a thread of its own, before it evicts."""
        self.tier = tier
        self._pinned = set[bytes]() if pinned is None else pinned
        self._layout = layout
        self._needs_marks = needs_marks(layout)
        # Half of what may be ahead waits in the tier, half here.
        half_bytes = tier.read_ahead_bytes
        self.loads = Loads(tier, layout, wake=lambda: post(_nothing), bound_bytes=half_bytes, clock=clock)

    # Out.

    def spill(
        self,
        leaf: Node[Entry],
        *,
        puts_away: bool = False,
        unused_s: UnusedS = lambda _: 0.0,
    ) -> Generator[None, None, Spilled]:
        """Write what the disk has not of the tokens up to a leaf's end, in small steps; after the first block that is
        not taken, nothing could be reached. Spans may be joined meanwhile; whoever goes on with it sees to it that the
        leaf is still there, and as long as it was. `puts_away`: also what the disk has in fewer bits of the last span.
        `unused_s`: how long ago a request last went on from an entry; what expires counts from there.

        What is written continues the blocks that are there, wherever those end: spans are joined, cut and loaded, marks
        come and go, and a chain made anew from what they are now would hardly be the one that was written.
        """
        ids = _ids_to(leaf)
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
            return Spilled(is_whole=False, refused=end.refused)
        return Spilled(is_whole=True, token_bytes=own_bytes / max(1, own_tokens))

    def _walk(self, key: bytes, start: int, ids: TokenIds) -> Generator[None, None, tuple[Step, ...]]:
        """The longest chain that is there, in small steps."""
        longest: tuple[Step, ...] = ()
        for number, trail in enumerate(self._trails(key, start, ids), 1):
            if not longest or trail[-1].end > longest[-1].end:
                longest = tuple(trail)
            if trail[-1].end == len(ids):
                break
            if number % STEPS_AT_ONCE == 0:
                yield
        return longest

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
        """Somebody asked for these, wherever they came from."""
        parts = (BASE, MARK) if self._needs_marks else (BASE,)
        self.tier.touch(BlockId(step.key, part) for step in steps for part in parts)

    def pin(self, chains: Iterable[tuple[bytes, TokenIds]]) -> None:
        """What the disk has of these tokens under these roots stays there, and nothing else. What comes to it later is
        pinned as it comes."""
        pinned = {step.key for root, ids in chains for step in self.chain_of(root, ids)}
        # Never without what stays pinned, whenever the tier asks.
        self._pinned |= pinned
        self._pinned &= pinned

    # Found.

    def chain_of(self, root: bytes, ids: TokenIds) -> tuple[Step, ...]:
        """The longest chain of blocks that begins these tokens, whether or not a sequence can go on from it."""
        return self._longest(root, ids, at_marks=False).steps

    def blocks_to(self, leaf: Node[Entry]) -> tuple[Step, ...]:
        """The blocks of all tokens up to a leaf's end, however they were cut; none where the disk has not all of it."""
        steps = self.chain_of(leaf.root_key, _ids_to(leaf))
        is_whole = bool(steps) and steps[-1].end == leaf.end
        if is_whole and leaf.end in leaf.payload.span.marks:
            is_whole = self.tier.find(steps[-1].key, MARK)
        return steps if is_whole else ()

    def match(self, root: bytes, ids: TokenIds) -> ColdMatch:
        """The longest chain of blocks that begins these tokens, and that a sequence can go on from."""
        return self._longest(root, ids, at_marks=self._needs_marks)

    def is_damaged_next(self, root: bytes, ids: TokenIds) -> bool:
        """Whether a block that goes on where these tokens' chain ends was found damaged, and put aside."""
        damaged = self.tier.damaged_keys()
        if not damaged:
            return False
        steps = self.chain_of(root, ids)
        parent, start = (steps[-1].key, steps[-1].end) if steps else (root, 0)
        ends = range(start + 1, min(start + BLOCK_TOKENS, len(ids)) + 1)
        return any(chain(parent, ids[start:end]) in damaged for end in ends)

    def has_others_only(self, root: bytes) -> bool:
        """Whether there are blocks, and none under this root."""
        return self.tier.usage().num_blocks > 0 and not self.tier.lengths(root)

    def _longest(self, root: bytes, ids: TokenIds, *, at_marks: bool) -> ColdMatch:
        best = ColdMatch()
        for trail in self._trails(root, 0, ids):
            step = trail[-1]
            if step.end > best.num_tokens and (not at_marks or self.tier.find(step.key, MARK)):
                best = ColdMatch(tuple(trail), at_marks)
                if step.end == len(ids):
                    return best
        return best

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
        for length in self.tier.lengths(parent):
            end = start + length
            if end <= len(ids):
                key = chain(parent, ids[start:end])
                if self.tier.find(key):
                    yield Step(key, parent, start, end)

    # Back.

    def load(
        self,
        root: bytes,
        salt: str,
        ids: TokenIds,
        match: ColdMatch,
        known_tokens: int,
        *,
        on_done: Callable[[Load], None] = lambda _: None,
        on_batch: Callable[[Load], None] | None = None,
    ) -> Load:
        """Begin to read what follows `known_tokens`. `on_done` is called when all is there, or no more will come."""
        steps = [step for step in match.steps if step.end > known_tokens]
        return self.loads.begin(
            root,
            salt,
            ids[: match.num_tokens],
            steps,
            with_mark=match.has_mark,
            on_done=on_done,
            on_batch=on_batch,
        )

    def give_up(self, load: Load) -> None:
        self.loads.give_up(load)


def _nothing() -> None:
    return


def _block(step: Step, ids: TokenIds, root: bytes, packed: Packed, part: str) -> Block:
    tensors = {name: Tensor(a.dtype, a.shape, a.octets) for name, a in packed.arrays.items()}
    token_ids = ids[step.start : step.end].astype("<i4", copy=False).tobytes()
    return Block(step.key, step.parent, root, step.start, token_ids, tensors, packed.description, part)


def _ids_to(leaf: Node[Entry]) -> TokenIds:
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
