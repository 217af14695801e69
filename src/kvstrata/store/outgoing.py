"""A stored conversation on its way out: block after block, as the disk tier would write it, under a root that tells
nothing of whose it was.

What leaves is leased until it has left. Arrays become bytes here, on the thread that owns MLX, in small steps.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass

from kvstrata.errors import InvalidRequest, Unavailable
from kvstrata.index.identity import Identity, root_key
from kvstrata.index.ids import TokenIds, Tokens, as_ids
from kvstrata.index.keys import chain
from kvstrata.spans.blocks import Packed, boundaries, pack_mark, packing
from kvstrata.spans.marks import Mark
from kvstrata.spans.span import SpanRange
from kvstrata.store.entry import Entry, Lease
from kvstrata.store.filing import Desk
from kvstrata.store.precision.mover import Mover
from kvstrata.store.search import Search
from kvstrata.tier.block import BASE, MARK, Block, Tensor

# Of one step in which a span that has just ended gets memory of its own.
STEP_S = 0.003


def neutral_root(identity: Identity) -> bytes:
    """What blocks that travel are chained from: it names the model and no salt."""
    return root_key(identity, "")


@dataclass(eq=False)
class Leaving:
    """One conversation: its first `len(ids)` tokens."""

    ids: TokenIds
    lease: Lease
    runs: tuple[tuple[Entry, int, int], ...]  # whose tokens [start, end) are
    marks: dict[int, Mark]  # by position; taken now, because they come and go
    root: bytes
    nbytes: int  # of all that will leave, about
    key: bytes = b""  # of the last block that left; empty: none has
    at: int = 0  # tokens that have left

    @property
    def is_done(self) -> bool:
        return self.at == len(self.ids)

    @property
    def ranges(self) -> tuple[SpanRange, ...]:
        return tuple(SpanRange(entry.span, start, end) for entry, start, end in self.runs)


class Outgoing:
    def __init__(self, desk: Desk, search: Search, mover: Mover) -> None:
        self._desk = desk
        self._search = search
        self._mover = mover

    def begin(self, tokens: Tokens, salt: str) -> Generator[None, None, Leaving]:
        """Lease what is in memory of these tokens, as far as a sequence can go on from it and no request still computes
        it. Raises InvalidRequest where that is nothing."""
        leaving = self._leased(as_ids(tokens), salt)
        try:
            yield from self._own_memory(leaving)
        except BaseException:
            self.end(leaving)
            raise
        return leaving

    def next_blocks(self, leaving: Leaving) -> Generator[None, None, tuple[Block, ...]]:
        """The next block, and the mark at its end if there is one."""
        start = leaving.at
        entry, last = next((entry, end) for entry, first, end in leaving.runs if first <= start < end)
        end = boundaries(entry.span, start, last)[0]
        # A mark may have gone since; the last one must be at the end of a block.
        end = min([end, *(at for at in leaving.marks if start < at < end)])
        packed = yield from packing(entry.span, start, end)
        parent = leaving.key or leaving.root
        leaving.key, leaving.at = chain(parent, leaving.ids[start:end]), end
        blocks = [self._block(leaving, parent, start, packed, BASE)]
        if end in leaving.marks:
            yield
            blocks.append(self._block(leaving, parent, start, pack_mark(leaving.marks[end]), MARK))
        return tuple(blocks)

    def end(self, leaving: Leaving) -> None:
        self._desk.leases.release(leaving.lease)

    def _leased(self, ids: TokenIds, salt: str) -> Leaving:
        match = self._desk.shelf.tree.match(self._search.root_of(salt), ids)
        runs: list[tuple[Entry, int, int]] = []
        marks: dict[int, Mark] = {}
        for node in match.path:
            end = min(node.end, match.num_tokens)
            if node.payload.is_running or end <= node.start:
                break
            runs.append((node.payload, node.start, end))
            marks |= {at: mark for at, mark in node.payload.span.marks.items() if node.start < at <= end}
        end = max(marks, default=0) if self._desk.marks.are_needed else (runs[-1][2] if runs else 0)
        if not end:
            raise InvalidRequest(
                "Nothing of this conversation can be exported: it is not stored, or a request still computes it. Try "
                "again when that has ended, or send its prompt once more.",
                code="not_stored",
            )
        kept = tuple((entry, first, min(last, end)) for entry, first, last in runs if first < end)
        lease = self._desk.leases.hold(entry for entry, _, _ in kept)
        nbytes = sum(e.span.kv_bytes * (b - a) // max(1, e.span.num_tokens) for e, a, b in kept)
        nbytes += sum(mark.nbytes for mark in marks.values())
        return Leaving(ids[:end], lease, kept, marks, neutral_root(self._search.identity), nbytes)

    def _own_memory(self, leaving: Leaving) -> Generator[None, None, None]:
        """Of requests that have ended just now: their buffers become spans."""
        for entry in dict.fromkeys(entry for entry, _, _ in leaving.runs):
            while entry.span.is_live and self._mover.has(entry):
                self._mover.finish(entry, time.monotonic() + STEP_S)
                yield
            if entry.span.is_live:
                raise Unavailable("This conversation is being written right now. Try again in a moment.")

    @staticmethod
    def _block(leaving: Leaving, parent: bytes, start: int, packed: Packed, part: str) -> Block:
        tensors = {name: Tensor(a.dtype, a.shape, a.octets) for name, a in packed.arrays.items()}
        token_ids = leaving.ids[start : leaving.at].astype("<i4", copy=False).tobytes()
        return Block(leaving.key, parent, leaving.root, start, token_ids, tensors, packed.description, part)
