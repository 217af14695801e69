"""Engine-thread steps of export and import."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from kvstrata.attention.parts import SealedPart
from kvstrata.errors import InvalidRequest, MemoryPinned, NeverFits, Unavailable
from kvstrata.prefix_cache.entries import Entry, Lease
from kvstrata.prefix_cache.insertion import Desk
from kvstrata.prefix_cache.jobs import JobQueue
from kvstrata.prefix_cache.keys import Identity, TokenIds, Tokens, as_ids, chain, root_key
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.reclaim import Reclaimer
from kvstrata.prefix_cache.worth import ReuseClass
from kvstrata.sizes import human_bytes
from kvstrata.spans.blocks import Packed, PackedArray, boundaries, pack_mark, packing, span_joining, unpack, unpack_mark
from kvstrata.spans.checks import check_mark, check_parts
from kvstrata.spans.marks import Mark
from kvstrata.spans.span import Span, SpanRange
from kvstrata.tier.block import BASE, MARK, Block, Tensor

# Of one step in which a span that has just ended gets memory of its own.
STEP_S = 0.003


def neutral_root(identity: Identity) -> bytes:
    """What blocks that travel are chained from: it names the model and no salt."""
    return root_key(identity, "")


@dataclass(eq=False)
class ConversationDeparture:
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


class ConversationExport:
    def __init__(self, desk: Desk, search: PrefixMatcher, mover: JobQueue) -> None:
        self._desk = desk
        self._search = search
        self._mover = mover

    def begin(self, tokens: Tokens, salt: str) -> Generator[None, None, ConversationDeparture]:
        """Lease what is in memory of these tokens, as far as a sequence can go on from it and no request still computes
        it. Raises InvalidRequest where that is nothing."""
        leaving = self._leased(as_ids(tokens), salt)
        try:
            yield from self._own_memory(leaving)
        except BaseException:
            self.end(leaving)
            raise
        return leaving

    def next_blocks(self, leaving: ConversationDeparture) -> Generator[None, None, tuple[Block, ...]]:
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

    def end(self, leaving: ConversationDeparture) -> None:
        self._desk.leases.release(leaving.lease)

    def _leased(self, ids: TokenIds, salt: str) -> ConversationDeparture:
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
        return ConversationDeparture(ids[:end], lease, kept, marks, neutral_root(self._search.identity), nbytes)

    def _own_memory(self, leaving: ConversationDeparture) -> Generator[None, None, None]:
        """Of requests that have ended just now: their buffers become spans."""
        for entry in dict.fromkeys(entry for entry, _, _ in leaving.runs):
            while entry.span.is_live and self._mover.has(entry):
                self._mover.run_entry(entry, time.monotonic() + STEP_S)
                yield
            if entry.span.is_live:
                raise Unavailable("This conversation is being written right now. Try again in a moment.")

    @staticmethod
    def _block(leaving: ConversationDeparture, parent: bytes, start: int, packed: Packed, part: str) -> Block:
        tensors = {name: Tensor(a.dtype, a.shape, a.octets) for name, a in packed.arrays.items()}
        token_ids = leaving.ids[start : leaving.at].astype("<i4", copy=False).tobytes()
        return Block(leaving.key, parent, leaving.root, start, token_ids, tensors, packed.description, part)


# Arrays that wait to be filed, at most.
BATCH_BYTES = 32 << 20


@dataclass(frozen=True)
class Imported:
    num_tokens: int
    num_new: int  # that were not stored yet


@dataclass(eq=False)
class ConversationArrival:
    """One conversation. `known`: tokens that were stored before."""

    root: bytes
    salt: str
    ids: TokenIds
    known: int
    lease: Lease  # on what it hangs on, and on what was filed
    start: int  # of the first block that waits to be filed
    end: int
    parts: list[dict[int, SealedPart]] = field(default_factory=list)
    num_bytes: int = 0
    marks: dict[int, Mark] = field(default_factory=dict)  # that wait for their tokens


class ConversationImport:
    def __init__(self, desk: Desk, search: PrefixMatcher, room: Reclaimer, counters: Counter[str]) -> None:
        self._desk = desk
        self._search = search
        self._room = room
        self._counters = counters

    def check(self, block: Block, like: Mark | None) -> Generator[None, None, None]:
        """Raises ConfigError where a block is not of this model. `like`: any mark of it."""
        yield
        end = block.start + block.num_tokens
        if block.part != MARK:
            check_parts(self._search.layout, unpack(self._search.layout, packed_of(block), block.start, end))
            return
        if like is None:
            raise ValueError("a model that needs no marks has none")
        check_mark(self._search.layout, unpack_mark(packed_of(block)), end, like)

    def begin(self, ids: TokenIds, salt: str, nbytes: int) -> ConversationArrival:
        """Raises NeverFits or MemoryPinned where there can be no room for so many bytes."""
        root = self._search.root_of(salt)
        match = self._desk.shelf.tree.match(root, ids)
        lease = self._desk.leases.hold(node.payload for node in match.path)
        try:
            self._require_room(nbytes if match.num_tokens < len(ids) else 0)
        except BaseException:
            self._desk.leases.release(lease)
            raise
        return ConversationArrival(root, salt, ids, match.num_tokens, lease, match.num_tokens, match.num_tokens)

    def add(self, arriving: ConversationArrival, block: Block) -> Generator[None, None, None]:
        """The next block, or the mark at the end of the last one."""
        end = block.start + block.num_tokens
        if block.part == MARK:
            arriving.marks[end] = unpack_mark(packed_of(block))
            return
        if end <= arriving.known:
            return
        if arriving.num_bytes and arriving.num_bytes + block.nbytes > BATCH_BYTES:
            yield from self._file(arriving)
        if not arriving.parts:
            arriving.start = block.start
        arriving.parts.append(unpack(self._search.layout, packed_of(block), block.start, end))
        arriving.end = end
        arriving.num_bytes += block.nbytes

    def making_room(self, nbytes: int) -> Generator[None, None, None]:
        """For arrays that are about to come. What has to go for it goes now."""
        yield
        if nbytes > self._room.left_bytes:
            limit_bytes = self._room.limit_bytes - nbytes
            self._room.shrink_to(limit_bytes, 0.0, most_bytes=limit_bytes)

    def add_span(self, arriving: ConversationArrival, span: Span) -> Generator[None, None, Imported]:
        """All tokens at once, from the first on."""
        arriving.marks |= span.marks
        span.marks = {}
        self._insert(arriving, span)
        return (yield from self.finish(arriving))

    def finish(self, arriving: ConversationArrival) -> Generator[None, None, Imported]:
        """All has come."""
        if arriving.parts:
            yield from self._file(arriving)
        path = self._desk.shelf.tree.match(arriving.root, arriving.ids).path
        for at, mark in sorted(arriving.marks.items()):
            if self._desk.marks.are_needed and any(node.start < at <= node.end for node in path):
                self._desk.marks.add_checkpoint(path, mark)
        self._counters["imported_tokens"] += len(arriving.ids) - arriving.known
        return Imported(len(arriving.ids), len(arriving.ids) - arriving.known)

    def end(self, arriving: ConversationArrival) -> None:
        """Nothing is kept for it any more; what was filed stays while there is room."""
        self._desk.leases.release(arriving.lease)

    def _require_room(self, nbytes: int) -> None:
        shelf, limit_bytes = self._desk.shelf, self._room.limit_bytes
        if nbytes > shelf.max_bytes:
            raise NeverFits(
                f"This conversation takes {human_bytes(nbytes)}, and this server has {human_bytes(shelf.max_bytes)} "
                "for stored KV. Give it more (--memory-limit, --hot-cache-size), or export fewer tokens. Nothing was "
                "changed."
            )
        in_use_bytes = shelf.nbytes - shelf.evictable_bytes
        if nbytes > limit_bytes - in_use_bytes:
            raise MemoryPinned(
                f"This conversation takes {human_bytes(nbytes)}. Of the {human_bytes(limit_bytes)} for stored KV, "
                f"{human_bytes(in_use_bytes)} are in use or pinned. Try again when requests have ended, or unpin "
                "something (POST /cache/unpin). Nothing was changed."
            )

    def _file(self, arriving: ConversationArrival) -> Generator[None, None, None]:
        parts, arriving.parts, arriving.num_bytes = arriving.parts, [], 0
        span = yield from span_joining(self._search.layout, parts, arriving.start, arriving.end)
        self._insert(arriving, span)

    def _insert(self, arriving: ConversationArrival, span: Span) -> None:
        shelf, limit_bytes = self._desk.shelf, self._room.limit_bytes
        nbytes = span.nbytes + sum(mark.nbytes for mark in arriving.marks.values())
        self._room.shrink_to(limit_bytes - nbytes, 0.0, most_bytes=limit_bytes - nbytes)
        # A node may claim no token that its span has not.
        hangs = shelf.tree.match(arriving.root, arriving.ids[: span.position]).num_tokens == span.position
        if not hangs or shelf.nbytes + nbytes > limit_bytes:
            raise MemoryPinned(
                f"The memory that there was for this conversation was needed by others meanwhile: {span.position} of "
                f"{len(arriving.ids)} tokens were taken. Import it again when fewer requests run."
            )
        entry = Entry(span, arriving.root, arriving.salt, ReuseClass.CONTINUED, is_running=False)
        shelf.add_entry(entry)
        path = shelf.insert_entry(entry, arriving.ids[: span.end])
        for at in [at for at in arriving.marks if at <= span.end]:
            self._desk.marks.add_checkpoint(path, arriving.marks.pop(at))
        self._desk.intake.finish_span(entry)
        # Another request may have filed these tokens meanwhile: what comes next hangs on them.
        self._desk.leases.extend(arriving.lease, (node.payload for node in path))


def packed_of(block: Block) -> Packed:
    arrays = {
        name: PackedArray(tensor.dtype, tensor.shape, np.frombuffer(tensor.view(), np.uint8))
        for name, tensor in block.tensors.items()
    }
    return Packed(arrays, dict(block.description))
