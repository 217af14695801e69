"""Span: the KV of consecutive tokens over all layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from kvstrata.attention.segments import SealedSegment, Segment, SegmentSlice, cut_segments
from kvstrata.kv.checkpoints import Checkpoint, states_at
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import Layout
from kvstrata.kv.own_kv import OwnKV
from kvstrata.kv.precision_plan import RAW, CodecPair
from kvstrata.kv.sequence_cache import Prefix, SequenceCache

LayerContent = OwnKV | tuple[SealedSegment, ...]


class Span:
    """Tokens [position, end) of a sequence in every layer with full attention, and checkpoints of the other layers.

    While its owner runs, a layer is the owner's own KV, and tokens count once they are committed. Afterwards it is
    sealed segments. Readers ask for the segments at each step, because transcoding replaces them.
    """

    def __init__(self, layout: Layout, position: int, num_tokens: int, contents: dict[int, LayerContent]) -> None:
        self.layout = layout
        self.position = position  # of its first token
        self.num_tokens = num_tokens  # committed: a live layer may hold more
        self._contents = contents  # by flat layer, full attention only
        self.version = 0  # changes with the contents
        self.checkpoints: dict[int, Checkpoint] = {}  # by position
        self.prompt_ends: set[int] = set()  # likely positions to resume or to diverge

    @property
    def end(self) -> int:
        return self.position + self.num_tokens

    @property
    def is_live(self) -> bool:
        return any(isinstance(content, OwnKV) for content in self._contents.values())

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._contents)

    @property
    def kv_bytes(self) -> int:
        """Allocated bytes without checkpoints. The buffers of a live span count whole."""
        return sum(segment.nbytes for segment in self.sealed_segments()) + self.live_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the owner's KV in a live span: buffers and sealed segments."""
        return sum(own.nbytes for own in self.live_layers())

    @property
    def owned_bytes(self) -> int:
        """Bytes that the span itself owns: without the KV of a running owner."""
        return sum(segment.nbytes for segment in self.sealed_segments()) + self.checkpoint_bytes

    @property
    def checkpoint_bytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints.values())

    @property
    def nbytes(self) -> int:
        return self.kv_bytes + self.checkpoint_bytes

    @property
    def written_end(self) -> int:
        """Position that the owner of a live span has written up to; the end of any other span."""
        return next((own.end for own in self.live_layers()), self.end)

    def codec_pairs(self, layer: int) -> tuple[CodecPair, ...]:
        """Return the distinct pairs of codecs that a layer is held in."""
        content = self._contents[layer]
        if isinstance(content, OwnKV):
            return (RAW,)
        return tuple(dict.fromkeys((segment.k.codec, segment.v.codec) for segment in content))

    def segments(self, layer: int, start: int, end: int) -> tuple[Segment, ...]:
        """Return the segments of tokens [start, end) of a layer; both are positions in the sequence."""
        content = self._contents[layer]
        if isinstance(content, OwnKV):
            return content.segments(start, end)
        first = content[0].k.position
        return tuple(cut_segments(content, start - first, end - first))

    def content(self, layer: int) -> LayerContent:
        """Return the content of a layer: the same object until `replace` is called."""
        return self._contents[layer]

    def sealed(self, layer: int) -> tuple[SealedSegment, ...]:
        """Return the segments of a sealed layer. Raises ValueError for a live one."""
        content = self._contents[layer]
        if isinstance(content, OwnKV):
            raise ValueError("a live layer is not sealed yet")
        return content

    def sealed_segments(self) -> Iterator[SealedSegment]:
        """Yield the segments of all sealed layers."""
        for content in self._contents.values():
            if not isinstance(content, OwnKV):
                yield from content

    def live_layers(self) -> Iterator[OwnKV]:
        for content in self._contents.values():
            if isinstance(content, OwnKV):
                yield content

    def replace(self, layer: int, segments: Sequence[SealedSegment]) -> None:
        """Replace the content of a layer."""
        self._contents[layer] = tuple(segments)
        self.version += 1

    def replace_range(self, layer: int, segments: Sequence[SealedSegment], start: int, end: int) -> None:
        """Replace tokens [start, end) of a sealed layer. Remainders of cut segments get memory of their own."""
        before, after = self.segments(layer, self.position, start), self.segments(layer, end, self.end)
        self.replace(layer, (*map(compact_segment, before), *segments, *map(compact_segment, after)))

    def cut(self, start: int, end: int) -> None:
        """Keep only tokens [start, end), positions in the sequence. `transcode.shrink` frees the memory."""
        if not self.position <= start < end <= self.end:
            raise ValueError(f"tokens {start} to {end} cannot be cut out of {self.position} to {self.end}")
        self.position, self.num_tokens = start, end - start
        self.version += 1
        self.checkpoints = {at: checkpoint for at, checkpoint in self.checkpoints.items() if start < at <= end}
        self.prompt_ends = {at for at in self.prompt_ends if start < at <= end}

    def append(self, after: Span) -> None:
        """Take over the tokens of the next span. A layer may then hold several segments, until it is transcoded.

        Copies only segments that a cut left longer than their span, because segments must be consecutive.
        """
        if after.position != self.end or self.is_live or after.is_live:
            raise ValueError(f"a span from {after.position} on cannot be joined to one that ends at {self.end}")
        for layer in self._contents:
            before = self.segments(layer, self.position, self.end)
            added = after.segments(layer, after.position, after.end)
            self.replace(layer, [compact_segment(segment) for segment in (*before, *added)])
        self.num_tokens += after.num_tokens
        self.checkpoints |= after.checkpoints
        self.prompt_ends |= after.prompt_ends


def compact_segment(segment: Segment) -> SealedSegment:
    """Return a sealed segment as it is, and a slice of one in memory of its own."""
    if isinstance(segment, SegmentSlice):
        whole, start, end = segment.whole, segment.start, segment.end
        return SealedSegment(whole.k.cut(start, end), whole.v.cut(start, end))
    assert isinstance(segment, SealedSegment), "a segment of a buffer is not sealed: its owner still writes it"
    return segment


@dataclass(frozen=True)
class SpanRange:
    """Tokens [start, end) of a span, positions in the sequence."""

    span: Span
    start: int
    end: int


class SpanSource:
    """A layer of a span range, read by a sequence that resumes after the range."""

    def __init__(self, span_range: SpanRange, layer: int) -> None:
        self._range = span_range
        self._layer = layer
        self._content: object = None  # of the layer, when `_segments` were cut from it
        self._segments: tuple[Segment, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self._range.end - self._range.start

    @property
    def version(self) -> Hashable:
        span = self._range.span
        content = span.content(self._layer)
        return (span.version, content.buffers.version) if isinstance(content, OwnKV) else span.version

    def segments(self) -> tuple[Segment, ...]:
        content = self._range.span.content(self._layer)
        if isinstance(content, OwnKV):
            self._content, self._segments = None, ()
            return content.segments(self._range.start, self._range.end)
        if content is not self._content:
            self._segments = self._range.span.segments(self._layer, self._range.start, self._range.end)
            self._content = content
        return self._segments


def empty_span(layout: Layout) -> Span:
    return Span(layout, 0, 0, {})


def live_span(layout: Layout, cache: SequenceCache) -> Span:
    """Return a span over the KV that a running sequence computes itself; no token is committed yet."""
    own = {i: layer.own for i, layer in enumerate(cache.flat) if isinstance(layer, FullLayer)}
    return Span(layout, cache.start, 0, dict(own))


def prefix_of(layout: Layout, ranges: Sequence[SpanRange], checkpoint: Checkpoint | None) -> Prefix:
    """Return the prefix from which a sequence resumes after `ranges`, which start at 0 and are consecutive."""
    num_tokens, specs = ranges[-1].end, layout.flat()
    sources = tuple(
        tuple(SpanSource(each, layer) for each in ranges if spec.kind == "full") for layer, spec in enumerate(specs)
    )
    return Prefix(num_tokens, sources, states_at(layout, checkpoint, num_tokens))
