"""The span: consecutive tokens of one sequence, over all layers.

While the sequence that computes it runs, a span is *live*: it holds that sequence's own tokens, and others read them
through it, so sealing copies nothing (`live.py`). After that it owns its memory: one or more parts in each layer, under
any codecs (`rewrite.py`). What a layer holds may be replaced between two steps; readers ask anew at each step and see
the replacement.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from kvstrata.attention.parts import Part, SealedPart, cut_parts
from kvstrata.layers.kinds import Layout
from kvstrata.layers.own import OwnTokens
from kvstrata.layers.sequence import Pair, Prefix
from kvstrata.spans.convert import RAW, owned
from kvstrata.spans.marks import Mark, states_at

Held = OwnTokens | tuple[SealedPart, ...]


class Span:
    def __init__(self, layout: Layout, position: int, num_tokens: int, held: dict[int, Held]) -> None:
        self.layout = layout
        self.position = position  # of its first token
        self.num_tokens = num_tokens  # sealed: a live layer may hold more
        self._held = held  # by flat layer, those with full attention
        self.version = 0  # changes with what it holds
        self.marks: dict[int, Mark] = {}  # by position
        self.ends: set[int] = set()  # where prompts ended: likely places to leave it or go on

    @property
    def end(self) -> int:
        return self.position + self.num_tokens

    @property
    def is_live(self) -> bool:
        return any(isinstance(held, OwnTokens) for held in self._held.values())

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._held)

    @property
    def kv_bytes(self) -> int:
        """Allocated, marks apart; of a live span the whole buffers."""
        live_bytes = sum(held.nbytes for held in self._held.values() if isinstance(held, OwnTokens))
        return sum(part.nbytes for part in self.sealed_parts()) + live_bytes

    @property
    def owned_bytes(self) -> int:
        """All that is in memory of its own: not the buffers of an owner."""
        return sum(part.nbytes for part in self.sealed_parts()) + self.mark_bytes

    @property
    def mark_bytes(self) -> int:
        return sum(mark.nbytes for mark in self.marks.values())

    @property
    def nbytes(self) -> int:
        return self.kv_bytes + self.mark_bytes

    def pairs(self, layer: int) -> tuple[Pair, ...]:
        """The codecs that a layer is stored under."""
        held = self._held[layer]
        if isinstance(held, OwnTokens):
            return (RAW,)
        return tuple(dict.fromkeys((part.k.codec, part.v.codec) for part in held))

    def parts(self, layer: int, start: int, end: int) -> tuple[Part, ...]:
        """Tokens [start, end), positions in the sequence."""
        held = self._held[layer]
        if isinstance(held, OwnTokens):
            return held.parts(start, end)
        first = held[0].k.position
        return tuple(cut_parts(held, start - first, end - first))

    def held(self, layer: int) -> Held:
        """What a layer holds: the same object until it is replaced."""
        return self._held[layer]

    def cut(self, start: int, end: int) -> None:
        """Keep only tokens [start, end), positions in the sequence. Memory follows with `shrink`."""
        if not self.position <= start < end <= self.end:
            raise ValueError(f"tokens {start} to {end} cannot be cut out of {self.position} to {self.end}")
        self.position, self.num_tokens = start, end - start
        self.version += 1
        self.marks = {at: mark for at, mark in self.marks.items() if start < at <= end}
        self.ends = {at for at in self.ends if start < at <= end}

    def append(self, after: Span) -> None:
        """Take over a neighbour's tokens. A layer may then hold several parts, until it is rewritten.

        Nothing is copied but what a cut left untrimmed: parts must follow each other.
        """
        if after.position != self.end or self.is_live or after.is_live:
            raise ValueError(f"a span from {after.position} on cannot be joined to one that ends at {self.end}")
        for layer in self._held:
            parts = (*self.parts(layer, self.position, self.end), *after.parts(layer, after.position, after.end))
            self.replace(layer, [owned(part) for part in parts])
        self.num_tokens += after.num_tokens
        self.marks |= after.marks
        self.ends |= after.ends

    def sealed(self, layer: int) -> tuple[SealedPart, ...]:
        """What a sealed layer holds, as it is."""
        held = self._held[layer]
        if isinstance(held, OwnTokens):
            raise ValueError("a live layer is not sealed yet")
        return held

    def replace(self, layer: int, parts: Sequence[SealedPart]) -> None:
        self._held[layer] = tuple(parts)
        self.version += 1

    def replace_range(self, layer: int, parts: Sequence[SealedPart], start: int, end: int) -> None:
        """Tokens [start, end) of a sealed layer. What is left of its other parts gets memory of its own."""
        before, after = self.parts(layer, self.position, start), self.parts(layer, end, self.end)
        self.replace(layer, (*map(owned, before), *parts, *map(owned, after)))

    def sealed_parts(self) -> Iterator[SealedPart]:
        for held in self._held.values():
            if not isinstance(held, OwnTokens):
                yield from held


def empty_span(layout: Layout) -> Span:
    return Span(layout, 0, 0, {})


@dataclass(frozen=True)
class SpanRange:
    """Tokens [start, end) of a span, positions in the sequence."""

    span: Span
    start: int
    end: int


class SpanSource:
    """One layer of a range, as a sequence that goes on from it reads it."""

    def __init__(self, run: SpanRange, layer: int) -> None:
        self._run = run
        self._layer = layer
        self._held: object = None
        self._parts: tuple[Part, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self._run.end - self._run.start

    @property
    def version(self) -> Hashable:
        span = self._run.span
        held = span.held(self._layer)
        return (span.version, held.pieces.version) if isinstance(held, OwnTokens) else span.version

    def parts(self) -> tuple[Part, ...]:
        held = self._run.span.held(self._layer)
        if isinstance(held, OwnTokens):
            self._held, self._parts = None, ()
            return held.parts(self._run.start, self._run.end)
        if held is not self._held:
            self._parts = self._run.span.parts(self._layer, self._run.start, self._run.end)
            self._held = held
        return self._parts


def prefix_of(layout: Layout, runs: Sequence[SpanRange], mark: Mark | None) -> Prefix:
    """What a sequence needs to go on after `runs`, which start at 0 and follow each other."""
    num_tokens, specs = runs[-1].end, layout.flat()
    sources = tuple(tuple(SpanSource(run, i) for run in runs if spec.kind == "full") for i, spec in enumerate(specs))
    return Prefix(num_tokens, sources, states_at(layout, mark, num_tokens))
