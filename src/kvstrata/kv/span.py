"""Consecutive tokens over all layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from kvstrata.attention.segments import Part, SealedPart, cut_parts
from kvstrata.kv.checkpoints import Mark, states_at
from kvstrata.kv.convert import RAW, live_pair, lowered, owned, stays
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import Layout
from kvstrata.kv.own_kv import OwnTokens
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.sequence_cache import Pair, Prefix, SequenceCache

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


# A running sequence is encoded again when so many tokens have come since.
SEAL_TOKENS = 256


def live_span(layout: Layout, cache: SequenceCache) -> Span:
    """What a sequence computes itself, nothing of it sealed yet."""
    held: dict[int, Held] = {i: layer.own for i, layer in enumerate(cache.flat) if isinstance(layer, FullLayer)}
    return Span(layout, cache.start, 0, held)


def live_bytes(span: Span) -> int:
    """Of its owner: buffers, and what is encoded of them."""
    return sum(own.nbytes for own in _own_tokens(span))


def written_end(span: Span) -> int:
    """Where the owner of a live span is; of others, their end."""
    return next((own.end for own in _own_tokens(span)), span.end)


def sealable_tokens(span: Span, window: RawWindow) -> int:
    """How many of a live span are encoded, or could be."""
    for own in _own_tokens(span):
        count = own.num_to_seal(window)
        return own.sealed_tokens + (count if count >= SEAL_TOKENS else 0)
    return 0


def has_to_seal(span: Span, layer: int, pair: Pair, window: RawWindow) -> bool:
    """Whether a live layer has enough to be encoded, or sealed tokens in more bits than the pair has."""
    own, dtype = span.held(layer), span.layout.flat()[layer].dtype
    if not isinstance(own, OwnTokens):
        return False
    return own.num_to_seal(window) >= SEAL_TOKENS or any(
        not stays(part, live_pair(part, pair), dtype) for part in own.sealed
    )


def sealing(span: Span, layer: int, pair: Pair, window: RawWindow, *, up_to: int) -> Iterator[None]:
    """Encode what the owner of a live layer had written when it was at `up_to`, but for the window; in small steps."""
    own, dtype = span.held(layer), span.layout.flat()[layer].dtype
    if not isinstance(own, OwnTokens):
        return
    for part in own.sealed:
        wanted = live_pair(part, pair)
        if not stays(part, wanted, dtype):
            own.replace_sealed(part, lowered(part, wanted, dtype))
            yield
    since = RawWindow(window.first_tokens, window.recent_tokens + max(0, own.end - up_to))
    if own.num_to_seal(since) >= SEAL_TOKENS:
        yield from own.sealing(*pair, since)


def _own_tokens(span: Span) -> Iterator[OwnTokens]:
    for layer in span.layers:
        held = span.held(layer)
        if isinstance(held, OwnTokens):
            yield held
