"""Span: the KV of consecutive tokens over all layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from kvstrata.attention.segments import CutPart, Part, SealedPart, cut_parts
from kvstrata.kv.checkpoints import Checkpoint, states_at
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import Layout
from kvstrata.kv.own_kv import OwnKV
from kvstrata.kv.precision_plan import RAW, CodecPair
from kvstrata.kv.sequence_cache import Prefix, SequenceCache

LayerContent = OwnKV | tuple[SealedPart, ...]


class Span:
    def __init__(self, layout: Layout, position: int, num_tokens: int, held: dict[int, LayerContent]) -> None:
        self.layout = layout
        self.position = position  # of its first token
        self.num_tokens = num_tokens  # committed: a live layer may hold more
        self._held = held  # by flat layer, full attention only
        self.version = 0  # changes with what it holds
        self.checkpoints: dict[int, Checkpoint] = {}  # by position
        self.prompt_ends: set[int] = set()  # where prompts ended: likely positions to resume or to diverge

    @property
    def end(self) -> int:
        return self.position + self.num_tokens

    @property
    def is_live(self) -> bool:
        return any(isinstance(held, OwnKV) for held in self._held.values())

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._held)

    @property
    def kv_bytes(self) -> int:
        """Allocated bytes without checkpoints; a live span counts its buffers whole."""
        live_bytes = sum(held.nbytes for held in self._held.values() if isinstance(held, OwnKV))
        return sum(part.nbytes for part in self.sealed_segments()) + live_bytes

    @property
    def owned_bytes(self) -> int:
        """Bytes in the span's own memory: not the KV buffers of a running owner."""
        return sum(part.nbytes for part in self.sealed_segments()) + self.checkpoint_bytes

    @property
    def checkpoint_bytes(self) -> int:
        return sum(mark.nbytes for mark in self.checkpoints.values())

    @property
    def nbytes(self) -> int:
        return self.kv_bytes + self.checkpoint_bytes

    def codec_pairs(self, layer: int) -> tuple[CodecPair, ...]:
        """Return the distinct pairs of codecs that a layer is held in."""
        held = self._held[layer]
        if isinstance(held, OwnKV):
            return (RAW,)
        return tuple(dict.fromkeys((part.k.codec, part.v.codec) for part in held))

    def segments(self, layer: int, start: int, end: int) -> tuple[Part, ...]:
        """Return tokens [start, end) of a layer, positions in the sequence."""
        held = self._held[layer]
        if isinstance(held, OwnKV):
            return held.segments(start, end)
        first = held[0].k.position
        return tuple(cut_parts(held, start - first, end - first))

    def content(self, layer: int) -> LayerContent:
        """Return the content of a layer: the same object until it is replaced."""
        return self._held[layer]

    def cut(self, start: int, end: int) -> None:
        """Keep only tokens [start, end), positions in the sequence. `shrink` frees the memory."""
        if not self.position <= start < end <= self.end:
            raise ValueError(f"tokens {start} to {end} cannot be cut out of {self.position} to {self.end}")
        self.position, self.num_tokens = start, end - start
        self.version += 1
        self.checkpoints = {at: mark for at, mark in self.checkpoints.items() if start < at <= end}
        self.prompt_ends = {at for at in self.prompt_ends if start < at <= end}

    def append(self, after: Span) -> None:
        """Take over the tokens of the next span. A layer may then hold several segments, until it is transcoded.

        Only segments that a cut left untrimmed are copied, because segments must be consecutive.
        """
        if after.position != self.end or self.is_live or after.is_live:
            raise ValueError(f"a span from {after.position} on cannot be joined to one that ends at {self.end}")
        for layer in self._held:
            parts = (*self.segments(layer, self.position, self.end), *after.segments(layer, after.position, after.end))
            self.replace(layer, [compact_segment(part) for part in parts])
        self.num_tokens += after.num_tokens
        self.checkpoints |= after.checkpoints
        self.prompt_ends |= after.prompt_ends

    def sealed(self, layer: int) -> tuple[SealedPart, ...]:
        """Return the segments of a sealed layer. Raises ValueError for a live one."""
        held = self._held[layer]
        if isinstance(held, OwnKV):
            raise ValueError("a live layer is not sealed yet")
        return held

    def replace(self, layer: int, parts: Sequence[SealedPart]) -> None:
        self._held[layer] = tuple(parts)
        self.version += 1

    def replace_range(self, layer: int, parts: Sequence[SealedPart], start: int, end: int) -> None:
        """Replace tokens [start, end) of a sealed layer. Remainders of cut segments get memory of their own."""
        before, after = self.segments(layer, self.position, start), self.segments(layer, end, self.end)
        self.replace(layer, (*map(compact_segment, before), *parts, *map(compact_segment, after)))

    def sealed_segments(self) -> Iterator[SealedPart]:
        for held in self._held.values():
            if not isinstance(held, OwnKV):
                yield from held

    def live_layers(self) -> Iterator[OwnKV]:
        for held in self._held.values():
            if isinstance(held, OwnKV):
                yield held


def compact_segment(part: Part) -> SealedPart:
    """Return a sealed segment as it is, and a slice of one in memory of its own."""
    if isinstance(part, CutPart):
        return SealedPart(part.whole.k.cut(part.start, part.end), part.whole.v.cut(part.start, part.end))
    assert isinstance(part, SealedPart), "what its owner still writes is not sealed"
    return part


def empty_span(layout: Layout) -> Span:
    return Span(layout, 0, 0, {})


@dataclass(frozen=True)
class SpanRange:
    """Tokens [start, end) of a span, positions in the sequence."""

    span: Span
    start: int
    end: int


class SpanSource:
    """A layer of a span range, as read by a sequence that resumes after the range."""

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
        held = span.content(self._layer)
        return (span.version, held.buffers.version) if isinstance(held, OwnKV) else span.version

    def parts(self) -> tuple[Part, ...]:
        held = self._run.span.content(self._layer)
        if isinstance(held, OwnKV):
            self._held, self._parts = None, ()
            return held.segments(self._run.start, self._run.end)
        if held is not self._held:
            self._parts = self._run.span.segments(self._layer, self._run.start, self._run.end)
            self._held = held
        return self._parts


def prefix_of(layout: Layout, runs: Sequence[SpanRange], mark: Checkpoint | None) -> Prefix:
    """Return the prefix from which a sequence resumes after `runs`, which start at 0 and are consecutive."""
    num_tokens, specs = runs[-1].end, layout.flat()
    sources = tuple(tuple(SpanSource(run, i) for run in runs if spec.kind == "full") for i, spec in enumerate(specs))
    return Prefix(num_tokens, sources, states_at(layout, mark, num_tokens))


def live_span(layout: Layout, cache: SequenceCache) -> Span:
    """Make the span of the tokens that a sequence computes itself; none is committed yet."""
    held: dict[int, LayerContent] = {i: layer.own for i, layer in enumerate(cache.flat) if isinstance(layer, FullLayer)}
    return Span(layout, cache.start, 0, held)


def live_bytes(span: Span) -> int:
    """Return the bytes of the owner of a live span: buffers and sealed segments."""
    return sum(own.nbytes for own in span.live_layers())


def written_end(span: Span) -> int:
    """Return the position that the owner of a live span has reached; the end of any other span."""
    return next((own.end for own in span.live_layers()), span.end)
