"""Precision that comes back: what was written before a span stepped down takes its place again, bit for bit.

One span after the other, and each block by block: what is on its way keeps to the bound of all reading, and what takes
its place to the memory that there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
import numpy as np

from kvstrata.attention.parts import CutPart, Part, SealedPart
from kvstrata.spans.blocks import span_of
from kvstrata.spans.convert import bits_of
from kvstrata.spans.plan import Plan
from kvstrata.spans.rewrite import shrink
from kvstrata.spans.span import Span
from kvstrata.store.cold.cold import Cold, ids_to
from kvstrata.store.cold.loads import BlockLoad
from kvstrata.store.entry import STEPPED_DOWN, Entry
from kvstrata.store.failures import Failures
from kvstrata.store.room import Room
from kvstrata.store.shelf import Shelf
from kvstrata.tier.chains import Link, TierMatch
from kvstrata.tier.lookups import Lookup


class Restorer:
    """`review` is told of what has come back: it may have come in more bits than it should have now. What comes back
    takes the room that there is: nothing has to go for it. An entry that is being restored may be evicted, cut and
    joined meanwhile: blocks take the place of the same tokens only."""

    def __init__(
        self,
        cold: Cold,
        shelf: Shelf,
        room: Room,
        counters: Counter[str],
        failures: Failures,
        review: Callable[[Entry], None],
    ) -> None:
        self._cold = cold
        self._shelf = shelf
        self._counters = counters
        self._review = review
        self._room = room
        self._failures = failures
        self._waiting: dict[Entry, None] = {}  # in order
        # Of the first of them:
        self._lookup: Lookup[tuple[Link, ...]] | None = None
        self._load: BlockLoad | None = None
        self._has_swapped = False

    @property
    def is_ready(self) -> bool:
        """Whether the disk has said what it has: `work` should be called."""
        return self._lookup is not None and self._lookup.is_done

    def has(self, entry: Entry) -> bool:
        return entry in self._waiting

    def restored_bytes(self, entry: Entry, plan: Plan) -> int:
        """What it would take under a plan when it has come back; 0 where the disk was given nothing better."""
        span = entry.span
        on_disk = entry.clean_token_bytes * span.num_tokens
        if span.is_live or not on_disk or span.kv_bytes >= STEPPED_DOWN * on_disk:
            return 0
        restored = int(min(on_disk, plan.token_bytes(span.layout) * span.num_tokens))
        return restored if restored * STEPPED_DOWN > span.kv_bytes else 0

    def add(self, entry: Entry) -> None:
        """Bring it back if the disk has all of it. That it has it in more bits is seen when it comes."""
        self._waiting[entry] = None
        self._shelf.journal.note(entry)
        self._begin()

    def discard(self, entry: Entry) -> None:
        """It stays as far as it has come."""
        if entry not in self._waiting:
            return
        if entry is next(iter(self._waiting)):
            self._let_go()
        self._waiting.pop(entry)
        self._shelf.journal.note(entry)
        self._begin()

    def clear(self) -> None:
        self._let_go()
        self._shelf.journal.note_all(self._waiting)
        self._waiting.clear()

    def work(self) -> None:
        """Between two steps, on the thread that owns MLX: the disk has said what it has of the first."""
        if self._lookup is None or not self._lookup.is_done:
            return
        entry, blocks, self._lookup = next(iter(self._waiting)), self._lookup.answer, None
        own = [link for link in blocks if link.end > entry.span.position]
        if not own or not self._can_take(entry):
            self._end(entry)
            return
        self._has_swapped = False
        self._load = BlockLoad(
            entry.root_key,
            entry.salt,
            ids_to(entry.last_node),
            TierMatch(tuple(own)),
            on_batch=lambda load: self._take(entry, load),
            on_done=lambda load: self._take_last(entry, load),
        )
        self._cold.loads.begin(self._load)

    def _begin(self) -> None:
        """The next one, unless one is on its way."""
        while self._waiting and self._lookup is None and self._load is None:
            entry = next(iter(self._waiting))
            if self._can_take(entry):
                self._lookup = self._cold.blocks_to(entry.last_node, with_mark=False)
            else:
                del self._waiting[entry]
                self._shelf.journal.note(entry)

    def _can_take(self, entry: Entry) -> bool:
        return entry in self._shelf.entries and bool(entry.nodes) and not entry.span.is_live

    def _let_go(self) -> None:
        """Of what is on its way."""
        if self._lookup is not None:
            self._lookup.withdraw()
        if self._load is not None:
            self._cold.loads.give_up(self._load)
        self._lookup = self._load = None

    def _end(self, entry: Entry) -> None:
        self._let_go()
        self._waiting.pop(entry, None)
        self._shelf.journal.note(entry)
        self._begin()

    def _take_last(self, entry: Entry, load: BlockLoad) -> None:
        """All has come, or no more will."""
        if load is not self._load:
            return  # it is of no use any more
        if load.is_whole:
            self._take(entry, load)
        else:
            self._counters["refused_restores"] += 1
        if load is self._load:
            self._finish(entry)

    def _finish(self, entry: Entry) -> None:
        if self._has_swapped:
            self._counters["restored_spans"] += 1
            self._review(entry)
        self._end(entry)

    def _take(self, entry: Entry, load: BlockLoad) -> None:
        try:
            self._swap(entry, load)
        except Exception as error:  # noqa: BLE001
            # It stays as far as it has come.
            self._failures.note("restores", error)
            self._finish(entry)

    def _swap(self, entry: Entry, load: BlockLoad) -> None:
        """What has come so far takes the place of what is there in fewer bits. The load ends where there is no room."""
        batch, span = load.take(), entry.span
        start, end = max(batch.start, span.position), min(batch.end, span.end)
        if not batch.blocks:
            return
        if not self._can_take(entry) or start >= end or not _has_tokens(entry, load, end):
            self._finish(entry)
            return
        came = span_of(span.layout, batch.blocks, batch.start, batch.end)
        came.cut(start, end)
        better = [layer for layer in span.layers if _bits(came, layer, start, end) > _bits(span, layer, start, end)]
        for layer in better:
            shrink(came, layer)
        grows = sum(_nbytes(came.sealed(layer)) - _share(span, layer, start, end) for layer in better)
        if grows > self._room.left_bytes:
            self._counters["restores_without_room"] += 1
            self._finish(entry)
            return
        for layer in better:
            span.replace_range(layer, came.sealed(layer), start, end)
        self._has_swapped |= bool(better)
        self._shelf.recount(entry)


def _has_tokens(entry: Entry, load: BlockLoad, end: int) -> bool:
    """Whether all tokens up to `end` are still those whose blocks are loaded. KV depends on every token before it."""
    return np.array_equal(ids_to(entry.last_node)[:end], load.ids[:end])


def _nbytes(parts: Iterable[SealedPart]) -> int:
    return sum(part.nbytes for part in parts)


def _share(span: Span, layer: int, start: int, end: int) -> int:
    """About what the tokens of a range take in a layer."""
    return sum(whole.nbytes * part.num_tokens // whole.num_tokens for part, whole in _wholes(span, layer, start, end))


def _bits(span: Span, layer: int, start: int, end: int) -> float:
    """Fewest that any token of a range has, K and V together."""
    dtype = span.layout.flat()[layer].dtype
    return min(_part_bits(whole, dtype) for _, whole in _wholes(span, layer, start, end))


def _part_bits(part: SealedPart, dtype: mx.Dtype) -> float:
    return bits_of(part.k.codec, part.k.dim, dtype) + bits_of(part.v.codec, part.v.dim, dtype)


def _wholes(span: Span, layer: int, start: int, end: int) -> Sequence[tuple[Part, SealedPart]]:
    """The parts of a range, each with what it is cut from."""
    parts = span.parts(layer, start, end)
    wholes = [part.whole if isinstance(part, CutPart) else part for part in parts]
    return [(part, whole) for part, whole in zip(parts, wholes, strict=True) if isinstance(whole, SealedPart)]
