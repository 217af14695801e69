"""Precision that comes back: what was written before a span stepped down takes its place again, bit for bit.

One span after the other: what is on its way takes memory that nobody counts yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from kvstrata.layers.parts import SealedPart
from kvstrata.spans.blocks import span_of
from kvstrata.spans.plan import Plan
from kvstrata.spans.rewrite import bits_of
from kvstrata.spans.span import Span
from kvstrata.store.cold import Cold, ColdMatch
from kvstrata.store.entry import STEPPED_DOWN, Entry
from kvstrata.store.loads import Load
from kvstrata.store.shelf import Shelf


class Restorer:
    """`review` is told of what has come back: it may have come in more bits than it should have now."""

    def __init__(
        self, cold: Cold | None, shelf: Shelf, counters: Counter[str], review: Callable[[Entry], None]
    ) -> None:
        self._cold = cold
        self._shelf = shelf
        self._counters = counters
        self._review = review
        self._waiting: dict[Entry, None] = {}  # in order
        self._load: Load | None = None  # of the first of them

    def has(self, entry: Entry) -> bool:
        return entry in self._waiting

    def restored_bytes(self, entry: Entry, plan: Plan) -> int:
        """What it would take under a plan when it has come back; 0 where the disk has nothing better."""
        span = entry.span
        on_disk = entry.clean_token_bytes * span.num_tokens
        if not on_disk or span.kv_bytes >= STEPPED_DOWN * on_disk or not self._blocks_of(entry).steps:
            return 0
        restored = int(min(on_disk, plan.token_bytes(span.layout) * span.num_tokens))
        return restored if restored * STEPPED_DOWN > span.kv_bytes else 0

    def add(self, entry: Entry) -> None:
        """Bring it back if the disk has all of it. That it has it in more bits is seen when it comes."""
        if self._blocks_of(entry).steps:
            self._waiting[entry] = None
            self._begin()

    def cancel(self) -> None:
        if self._load is not None and self._cold is not None:
            self._cold.give_up(self._load)
        self._load = None
        self._waiting.clear()

    def _begin(self) -> None:
        """The next one, unless one is on its way."""
        while self._load is None and self._waiting:
            entry = next(iter(self._waiting))
            match = self._blocks_of(entry)
            if self._cold is None or not match.steps:
                del self._waiting[entry]
                continue
            self._load = self._cold.load(
                entry.root_key,
                entry.salt,
                _ids_to(entry),
                match,
                match.steps[0].start,
                on_done=lambda load, entry=entry: self._take(entry, load),
            )

    def _blocks_of(self, entry: Entry) -> ColdMatch:
        """Its own blocks on the disk, of which the first may begin before it; none where they do not end with it."""
        if self._cold is None or entry not in self._shelf.entries or not entry.nodes or entry.span.is_live:
            return ColdMatch()
        span = entry.span
        steps = [s for s in self._cold.chain_of(entry.root_key, _ids_to(entry)) if s.end > span.position]
        return ColdMatch(tuple(steps) if steps and steps[-1].end == span.end else ())

    def _take(self, entry: Entry, load: Load) -> None:
        """Between two steps, on the thread that owns MLX."""
        if load is not self._load:
            return  # nobody waits for it any more
        self._load = None
        del self._waiting[entry]
        self._swap(entry, load)
        self._begin()

    def _swap(self, entry: Entry, load: Load) -> None:
        span = entry.span
        first, last = load.steps[0].start, load.steps[-1].end
        same = entry in self._shelf.entries and first <= span.position and span.end == last
        if not load.is_whole or not same or span.is_live:
            self._counters["refused_restores"] += 1
            return
        came = span_of(span.layout, load.blocks, first, last)
        came.cut(span.position, span.end)
        better = [layer for layer in span.layers if _bits(came, layer) > _bits(span, layer)]
        for layer in better:
            came.shrink(layer)
            span.replace(layer, came.planes(layer))
        if better:
            self._counters["restored_spans"] += 1
        self._shelf.recount(entry)
        self._review(entry)


def _ids_to(entry: Entry) -> np.ndarray:
    return np.concatenate([node.tokens for node in entry.last_node.path()])


def _bits(span: Span, layer: int) -> float:
    """Fewest that any of its tokens has, K and V together."""
    dtype = span.layout.flat()[layer].dtype

    def both(part: SealedPart) -> float:
        return bits_of(part.k.codec, part.k.dim, dtype) + bits_of(part.v.codec, part.v.dim, dtype)

    return min(both(part) for part in span.planes(layer))
