"""Between what is in memory and blocks on a disk: what goes there, what is found there, and the way back.

A conversation is a chain of blocks, each named by its tokens and all that comes before. Whatever is written, all that
it hangs on is written first, so that every block on the disk can be reached from the first token. Arrays become bytes
here, on the thread that owns MLX; the tier's threads see bytes only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstrata.index.ids import TokenIds
from kvstrata.index.keys import chain
from kvstrata.index.tree import Node
from kvstrata.layers.kinds import Layout
from kvstrata.layers.parts import SealedPart
from kvstrata.spans.blocks import BLOCK_TOKENS, Packed, PackedArray, boundaries, pack, pack_mark, unpack, unpack_mark
from kvstrata.spans.marks import Mark, needs_marks
from kvstrata.store.entry import Entry
from kvstrata.tiers.block import Block, BlockId, Tensor
from kvstrata.tiers.disk import Accepted, DiskTier
from kvstrata.tiers.reader import Loaded, Missing, Ticket
from kvstrata.tiers.reasons import Refusal

log = logging.getLogger(__name__)

MARK = "mark"
# A load that cannot pay is given up after this share of the time that computing the tokens would take.
PATIENCE = 0.03

Post = Callable[[Callable[[], None]], None]  # run something on the thread that owns MLX, soon


@dataclass(frozen=True)
class Step:
    """One block of a chain."""

    key: bytes
    parent: bytes
    start: int
    end: int


@dataclass(frozen=True)
class ColdMatch:
    steps: tuple[Step, ...] = ()
    has_mark: bool = False  # at the end

    @property
    def num_tokens(self) -> int:
        return self.steps[-1].end if self.steps else 0


@dataclass(eq=False)
class Load:
    """Blocks of a prompt on their way into memory."""

    root: bytes
    salt: str
    ids: TokenIds  # all tokens up to the last block's end
    steps: tuple[Step, ...]  # to be loaded; what comes before is in memory
    began_s: float
    blocks: list[dict[int, SealedPart]] = field(default_factory=list)
    mark: Mark | None = None
    ticket: Ticket | None = None
    is_done: bool = False
    on_done: Callable[[Load], None] = lambda _: None

    @property
    def num_loaded(self) -> int:
        return self.steps[len(self.blocks) - 1].end - self.steps[0].start if self.blocks else 0

    @property
    def num_tokens(self) -> int:
        return self.steps[-1].end - self.steps[0].start

    def gives_up_at(self, prefill_tokens_s: float) -> float:
        """When computing would have been faster, so far."""
        return self.began_s + (self.num_loaded + PATIENCE * self.num_tokens) / prefill_tokens_s


class Cold:
    def __init__(
        self, tier: DiskTier, layout: Layout, *, post: Post, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tier = tier
        self._layout = layout
        self._needs_marks = needs_marks(layout)
        self._post = post
        self.num_unreadable = 0  # blocks that were whole, and of no use
        self._clock = clock

    # Out.

    def spill(self, leaf: Node[Entry]) -> Iterator[bool]:
        """Write what the disk has not of the tokens up to a leaf's end. Yields after each block whether it was taken;
        the first that is not is the last: nothing could be reached after it."""
        if any(node.payload.span.is_live for node in leaf.path()):
            yield False  # somebody still writes what it hangs on
            return
        for step, entry, ids in self._chain_to(leaf):
            taken = self._put(step, entry, ids, leaf.root_key)
            yield taken
            if not taken:
                return

    def _chain_to(self, leaf: Node[Entry]) -> Iterator[tuple[Step, Entry, TokenIds]]:
        key, start = leaf.root_key, 0
        ids = np.concatenate([node.tokens for node in leaf.path()])
        for entry, first, last in _runs(leaf):
            for end in boundaries(entry.span, first, last):
                parent, key = key, chain(key, ids[start:end])
                yield Step(key, parent, start, end), entry, ids[start:end]
                start = end

    def _put(self, step: Step, entry: Entry, ids: TokenIds, root: bytes) -> bool:
        if entry.was_used:
            self.tier.asked_for([step.key])
        taken = self.tier.find(step.key) or self._offer(step, ids, root, pack(entry.span, step.start, step.end), "base")
        mark = entry.span.marks.get(step.end)
        if taken and mark is not None and not self.tier.find(step.key, MARK):
            return self._offer(step, ids, root, pack_mark(mark), MARK)
        return taken

    def _offer(self, step: Step, ids: TokenIds, root: bytes, packed: Packed, part: str) -> bool:
        tensors = {name: Tensor(a.dtype, a.shape, a.octets) for name, a in packed.arrays.items()}
        token_ids = ids.astype("<i4", copy=False).tobytes()
        block = Block(step.key, step.parent, root, step.start, token_ids, tensors, packed.description, part)
        answer = self.tier.put(block)
        return isinstance(answer, Accepted) or answer.reason is Refusal.PRESENT

    # Found.

    def chain_of(self, root: bytes, ids: TokenIds) -> tuple[Step, ...]:
        """The longest chain of blocks that begins these tokens, whether or not a sequence can go on from it."""
        return self._longest(root, ids, at_marks=False).steps

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
        trail: list[Step] = []
        waiting = [self._following(root, 0, ids)]
        while waiting:
            step = next(waiting[-1], None)
            if step is None:
                waiting.pop()
                if trail:
                    trail.pop()
                continue
            trail.append(step)
            waiting.append(self._following(step.key, step.end, ids))
            if step.end > best.num_tokens and (not at_marks or self.tier.find(step.key, MARK)):
                best = ColdMatch(tuple(trail), at_marks)
                if step.end == len(ids):
                    return best
        return best

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
        on_done: Callable[[Load], None] = lambda _: None,
    ) -> Load:
        """Begin to read what follows `known_tokens`. `on_done` is called when all is there, or no more will come."""
        steps = tuple(step for step in match.steps if step.end > known_tokens)
        load = Load(root, salt, ids[: match.num_tokens], steps, self._clock(), on_done=on_done)
        wanted = [BlockId(step.key) for step in steps]
        if match.has_mark:
            # First: without it the rest is of no use.
            wanted.insert(0, BlockId(steps[-1].key, MARK))
        load.ticket = self.tier.read(wanted, lambda came: self._post(lambda: self._take_in(load, came)), root=root)
        return load

    def give_up(self, load: Load) -> None:
        if load.ticket is not None:
            load.ticket.cancel()
        load.is_done = True

    def _take_in(self, load: Load, came: Loaded | Missing) -> None:
        if load.is_done:
            return
        if isinstance(came, Missing):
            self._fail(load)
            return
        try:
            if came.block.part == MARK:
                load.mark = unpack_mark(_packed(came.block))
            else:
                load.blocks.append(unpack(self._layout, _packed(came.block)))
        except Exception:
            # Verified bytes that this version cannot read: a miss, whatever the reason, and never a failed request.
            self.num_unreadable += 1
            log.exception("a block of the disk cache cannot be read by this version")
            self._fail(load)
            return
        load.is_done = len(load.blocks) == len(load.steps)
        if load.is_done:
            load.on_done(load)

    def _fail(self, load: Load) -> None:
        self.give_up(load)
        load.on_done(load)


def _runs(leaf: Node[Entry]) -> list[tuple[Entry, int, int]]:
    """Whose tokens lie on the way to a leaf: entry, from, to."""
    runs: list[tuple[Entry, int, int]] = []
    for node in leaf.path():
        if runs and runs[-1][0] is node.payload:
            runs[-1] = (node.payload, runs[-1][1], node.end)
        else:
            runs.append((node.payload, node.start, node.end))
    return runs


def _packed(block: Block) -> Packed:
    arrays: dict[str, PackedArray] = {}
    for name, tensor in block.tensors.items():
        octets = np.frombuffer(tensor.view(), np.uint8)
        arrays[name] = PackedArray(tensor.dtype, tensor.shape, octets)
    description: dict[str, Any] = dict(block.description)
    return Packed(arrays, description)
