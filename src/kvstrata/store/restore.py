"""Precision that comes back: what was written before a span stepped down takes its place again, bit for bit."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvstrata.layers.parts import SealedPart
from kvstrata.spans.blocks import span_of
from kvstrata.spans.rewrite import bits_of
from kvstrata.spans.span import Span
from kvstrata.store.cold import Cold, ColdMatch
from kvstrata.store.entry import Entry
from kvstrata.store.loads import Load
from kvstrata.store.shelf import Shelf


class Restorer:
    def __init__(self, cold: Cold | None, shelf: Shelf, counters: Counter[str]) -> None:
        self._cold = cold
        self._shelf = shelf
        self._counters = counters
        self._loads: dict[Entry, Load] = {}

    def can(self, entry: Entry) -> bool:
        """Whether the disk has all of it. It may have it in no higher precision: that is seen when it comes."""
        return self._cold is not None and bool(self._blocks_of(entry).steps)

    def begin(self, entry: Entry) -> bool:
        if self._cold is None or entry in self._loads:
            return False
        match = self._blocks_of(entry)
        if not match.steps:
            return False
        ids = _ids_to(entry)
        self._loads[entry] = self._cold.load(
            entry.root_key, entry.salt, ids, match, match.steps[0].start, on_done=lambda load: self._swap(entry, load)
        )
        return True

    def cancel(self) -> None:
        for load in self._loads.values():
            assert self._cold is not None
            self._cold.give_up(load)
        self._loads.clear()

    @property
    def num_pending(self) -> int:
        return len(self._loads)

    def _blocks_of(self, entry: Entry) -> ColdMatch:
        """Its own blocks on the disk; none where they do not cover it exactly."""
        if self._cold is None or not entry.nodes or entry.span.is_live:
            return ColdMatch()
        span = entry.span
        steps = [s for s in self._cold.chain_of(entry.root_key, _ids_to(entry)) if s.start >= span.position]
        covers = bool(steps) and steps[0].start == span.position and steps[-1].end == span.end
        return ColdMatch(tuple(steps) if covers else ())

    def _swap(self, entry: Entry, load: Load) -> None:
        """Between two steps, on the thread that owns MLX."""
        self._loads.pop(entry, None)
        span = entry.span
        same = entry in self._shelf.entries and (span.position, span.end) == (load.steps[0].start, load.steps[-1].end)
        if not load.is_whole or not same or span.is_live:
            self._counters["refused_restores"] += 1
            return
        came = span_of(span.layout, load.blocks, span.position, span.end)
        for layer in span.layers:
            if _bits(came, layer) > _bits(span, layer):
                span.replace(layer, came.planes(layer))
        entry.target = None
        self._counters["restored_spans"] += 1
        self._shelf.recount(entry)


def _ids_to(entry: Entry) -> np.ndarray:
    leaf = max(entry.nodes, key=lambda node: node.end)
    return np.concatenate([node.tokens for node in leaf.path()])


def _bits(span: Span, layer: int) -> float:
    """Fewest that any of its tokens has, K and V together."""
    dtype = span.layout.flat()[layer].dtype

    def both(part: SealedPart) -> float:
        return bits_of(part.k.codec, part.k.dim, dtype) + bits_of(part.v.codec, part.v.dim, dtype)

    return min(both(part) for part in span.planes(layer))
