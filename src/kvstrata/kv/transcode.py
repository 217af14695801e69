"""Transcode layers of a span in small steps: trim, encode, step down and join.

Codes are kept where possible: a planes codec steps down by dropping planes, and segments of the same codecs are joined
as they are. Everything else is decoded and encoded again, which never restores precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile

import mlx.core as mx

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentSlice, cut_segments
from kvstrata.codecs.base import Codec, EncodedArray
from kvstrata.codecs.planes import PlanesCodec, step_down
from kvstrata.codecs.raw import RawCodec
from kvstrata.kv.checkpoints import Checkpoint
from kvstrata.kv.own_kv import OwnKV
from kvstrata.kv.precision_plan import RAW, CodecPair, PrecisionPlan, bits_of
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.span import Span, compact_segment
from kvstrata.kv.work_sizes import WorkSizes, slices, work_sizes_of

# Tokens of a running sequence that are encoded together, at least.
ENCODE_TOKENS = 256


class LayerTranscoder:
    """Transcoding of one layer to a pair of codecs, into new memory that holds exactly the span's tokens.

    Readers see the old or the new segments, and between two steps the layer is whole. The caller passes the span to
    each step, and no reference is kept: the memory of a span that is evicted meanwhile is freed at once.
    """

    def __init__(self, layer: int, pair: CodecPair) -> None:
        self._layer = layer
        self._pair = pair
        self._version = -1  # of the span after the last step
        self._start = 0  # tokens before this position are done and in the span
        self._at = 0  # tokens before this position are done
        self._done: list[SealedSegment] = []  # tokens [start, at)

    def advance(self, span: Span, *, upward: bool = False) -> bool:
        """Do the next small step. Return whether there is more to do. The work starts over where other code has changed
        the span since the last step."""
        if span.num_tokens < 1:
            raise ValueError(f"a span of {span.num_tokens} tokens cannot be transcoded: commit some first")
        if self._version != span.version:
            self._version, self._start, self._at, self._done = span.version, span.position, span.position, []
        if self._pair == RAW and self._at == span.position and _adopt_buffer(span, self._layer):
            return False
        spec = span.layout.flat()[self._layer]
        sizes = work_sizes_of(spec)
        is_same = True
        while is_same and self._at < span.end:
            segments = span.segments(self._layer, self._at, span.end)
            segment = _transcode_first(segments, self._at, self._pair, spec.dtype, sizes, upward=upward)
            is_same = segment is segments[0]
            self._done.append(segment)
            self._at += segment.num_tokens
            if self._at % sizes.segment_tokens == 0 or self._at == span.end:
                self._done = sizes.join_neighbours(self._done)
                self._put(span)
        return self._at < span.end

    def _put(self, span: Span) -> None:
        """Replace segments that the finished ones cover whole. Buffers are replaced together, at the end."""
        content = span.content(self._layer)
        after: tuple[SealedSegment, ...] = ()
        if self._at < span.end:
            if isinstance(content, OwnKV) or any(segment.k.position < self._at < segment.k.end for segment in content):
                return
            after = tuple(segment for segment in content if segment.k.position >= self._at)
        done = () if isinstance(content, OwnKV) else content
        before = (segment for segment in done if span.position < segment.k.end <= self._start)
        span.replace(self._layer, (*before, *self._done, *after))
        self._version, self._start, self._done = span.version, self._at, []


def transcode_layer(span: Span, layer: int, pair: CodecPair, *, upward: bool = False) -> None:
    """Transcode a layer, all steps at once."""
    transcoder = LayerTranscoder(layer, pair)
    while transcoder.advance(span, upward=upward):
        pass


def is_transcoded(span: Span, layer: int, pair: CodecPair, *, upward: bool = False) -> bool:
    """Whether transcoding would leave the layer as it is."""
    content, spec = span.content(layer), span.layout.flat()[layer]
    if isinstance(content, OwnKV) or sum(segment.num_tokens for segment in content) != span.num_tokens:
        return False
    sizes = work_sizes_of(spec)
    if any(sizes.may_join(a, b) for a, b in pairwise(content)):
        return False
    return all(keeps_codecs(segment, pair, spec.dtype, upward=upward) for segment in content)


def shrink(span: Span, layer: int) -> None:
    """Free the memory of tokens that a cut removed, and a live layer's buffers, which nobody may write any more."""
    if isinstance(span.content(layer), OwnKV):
        transcode_layer(span, layer, RAW)
    else:
        span.replace(layer, [compact_segment(segment) for segment in span.segments(layer, span.position, span.end)])


def _adopt_buffer(span: Span, layer: int) -> bool:
    """Keep a buffer as it is if the span fills it exactly. Return whether it was kept."""
    content = span.content(layer)
    if not isinstance(content, OwnKV) or (content.start, content.end) != (span.position, span.end):
        return False
    whole = content.whole_arrays()
    if whole is not None:
        span.replace(layer, (SealedSegment(*(RawCodec().adopt(array, span.position) for array in whole)),))
    return whole is not None


# Checkpoints.


def transcode_checkpoints(span: Span, plan: PrecisionPlan) -> Iterator[None]:
    """Transcode the checkpoints, a ring in each step. Steps are short: no ring is longer than its window."""
    for at in list(span.checkpoints):
        for i, (pair, spec) in enumerate(zip(plan.pairs, span.layout.flat(), strict=True)):
            checkpoint = span.checkpoints.get(at)  # None: removed meanwhile
            ring = checkpoint.states[i] if checkpoint is not None else None
            if checkpoint is not None and isinstance(ring, SealedSegment) and not keeps_codecs(ring, pair, spec.dtype):
                transcoded = transcode_segment(ring, pair, spec.dtype)
                states = (*checkpoint.states[:i], transcoded, *checkpoint.states[i + 1 :])
                span.checkpoints[at] = dataclasses.replace(checkpoint, states=states)
                yield


def are_checkpoints_transcoded(span: Span, plan: PrecisionPlan) -> bool:
    """Whether transcoding would leave all checkpoints as they are. A model may have no other KV."""
    return all(_is_checkpoint_transcoded(span, checkpoint, plan) for checkpoint in span.checkpoints.values())


def _is_checkpoint_transcoded(span: Span, checkpoint: Checkpoint, plan: PrecisionPlan) -> bool:
    states = zip(checkpoint.states, plan.pairs, span.layout.flat(), strict=True)
    return all(
        keeps_codecs(state, pair, spec.dtype) for state, pair, spec in states if isinstance(state, SealedSegment)
    )


# Live layers, which their owner still writes.


def has_to_encode(span: Span, layer: int, pair: CodecPair, window: RawWindow) -> bool:
    """Whether a live layer has enough raw tokens to encode, or sealed tokens with more bits than `pair` has."""
    own, dtype = span.content(layer), span.layout.flat()[layer].dtype
    if not isinstance(own, OwnKV):
        return False
    return own.num_to_encode(window) >= ENCODE_TOKENS or any(
        not keeps_codecs(segment, live_codecs(segment, pair), dtype) for segment in own.sealed
    )


def encodable_tokens(span: Span, window: RawWindow) -> int:
    """Return how many tokens of a live span are encoded, or could be."""
    for own in span.live_layers():
        count = own.num_to_encode(window)
        return own.sealed_tokens + (count if count >= ENCODE_TOKENS else 0)
    return 0


def encode_live(span: Span, layer: int, pair: CodecPair, window: RawWindow, *, up_to: int) -> Iterator[None]:
    """Encode the tokens of a live layer before position `up_to` in small steps, except for the raw window."""
    own, dtype = span.content(layer), span.layout.flat()[layer].dtype
    if not isinstance(own, OwnKV):
        return
    for segment in own.sealed:
        wanted = live_codecs(segment, pair)
        if not keeps_codecs(segment, wanted, dtype):
            own.replace_segment(segment, transcode_segment(segment, wanted, dtype))
            yield
    since = RawWindow(window.first_tokens, window.recent_tokens + max(0, own.end - up_to))
    if own.num_to_encode(since) >= ENCODE_TOKENS:
        yield from own.encode_past(*pair, since)


def live_codecs(segment: SealedSegment, pair: CodecPair) -> CodecPair:
    """Return the codecs for a sealed segment of a running sequence: the raw first tokens stay raw."""
    return RAW if _codecs_of(segment) == RAW else pair


# Segments.


def becomes(held: Codec, wanted: Codec, dim: int, dtype: mx.Dtype, *, upward: bool = False) -> Codec:
    """Return the codec that `held` is transcoded to where `wanted` is the target: never more bits than `held`, unless
    `upward`. A planes codec keeps its means: only tokens that are encoded again get the means of `wanted`."""
    if isinstance(held, PlanesCodec) and isinstance(wanted, PlanesCodec) and wanted.bits <= held.bits:
        return dataclasses.replace(held, bits=wanted.bits)
    return wanted if upward or bits_of(wanted, dim, dtype) < bits_of(held, dim, dtype) else held


def codecs_after(segment: SealedSegment, pair: CodecPair, dtype: mx.Dtype, *, upward: bool = False) -> CodecPair:
    """Return the codecs that a segment would be transcoded to."""
    k, v = _codecs_of(segment)
    return (
        becomes(k, pair[0], segment.k.dim, dtype, upward=upward),
        becomes(v, pair[1], segment.v.dim, dtype, upward=upward),
    )


def keeps_codecs(segment: SealedSegment, pair: CodecPair, dtype: mx.Dtype, *, upward: bool = False) -> bool:
    """Whether transcoding would leave a segment as it is."""
    return codecs_after(segment, pair, dtype, upward=upward) == _codecs_of(segment)


def transcode_segment(segment: SealedSegment, pair: CodecPair, dtype: mx.Dtype) -> SealedSegment:
    """Transcode a whole segment at once, never to more bits than it has."""
    k, v = codecs_after(segment, pair, dtype)
    return SealedSegment(_transcode_array(segment.k, k, dtype), _transcode_array(segment.v, v, dtype))


def _transcode_first(
    segments: Sequence[Segment], start: int, pair: CodecPair, dtype: mx.Dtype, sizes: WorkSizes, *, upward: bool
) -> SealedSegment:
    """Transcode the first tokens of consecutive segments, as many as one step handles, into new memory. `start` is the
    position of the first token.

    Tokens with fewer bits than `pair` keep their codec, unless `upward`: more bits would restore nothing.
    """
    segment = segments[0]
    if isinstance(segment, RawSegment):
        # Buffers end anywhere: a codec's group may be in two of them.
        raw = list(takewhile(lambda each: isinstance(each, RawSegment), segments))
        num_tokens = _step_tokens(start, sum(each.num_tokens for each in raw), sizes, encodes=pair != RAW)
        k, v = segments_to_arrays(tuple(cut_segments(raw, 0, num_tokens)), segment.k_buffer.dtype)
        return SealedSegment(pair[0].encode(k.squeeze(0), start), pair[1].encode(v.squeeze(0), start))
    whole, first = (segment.whole, segment.start) if isinstance(segment, SegmentSlice) else (segment, 0)
    assert isinstance(whole, SealedSegment)
    codecs = k, v = codecs_after(whole, pair, dtype, upward=upward)
    encodes = not (_encodes_nothing(whole.k, k) and _encodes_nothing(whole.v, v))
    if segment is whole and not encodes:
        if codecs == _codecs_of(whole):
            return whole
        return SealedSegment(_transcode_array(whole.k, k, dtype), _transcode_array(whole.v, v, dtype))
    end = first + _step_tokens(start, segment.num_tokens, sizes, encodes=encodes)
    return SealedSegment(
        _transcode_range(whole.k, first, end, k, dtype), _transcode_range(whole.v, first, end, v, dtype)
    )


def _step_tokens(start: int, num_tokens: int, sizes: WorkSizes, *, encodes: bool) -> int:
    first, end = next(slices(start, start + num_tokens, sizes.slice_tokens if encodes else sizes.segment_tokens))
    return end - first


def _codecs_of(segment: SealedSegment) -> CodecPair:
    return segment.k.codec, segment.v.codec


def _transcode_range(encoded: EncodedArray, start: int, end: int, codec: Codec, dtype: mx.Dtype) -> EncodedArray:
    """Transcode tokens [start, end) of an encoded array, counted from its first token."""
    if (start, end) == (0, encoded.num_tokens):
        return _transcode_array(encoded, codec, dtype)
    if isinstance(encoded.codec, RawCodec) and codec != encoded.codec:
        return codec.encode(encoded.arrays["values"][:, start:end], encoded.position + start)
    return _transcode_array(encoded.cut(start, end), codec, dtype)


def _transcode_array(encoded: EncodedArray, codec: Codec, dtype: mx.Dtype) -> EncodedArray:
    if encoded.codec == codec:
        return encoded
    if _encodes_nothing(encoded, codec):
        assert isinstance(codec, PlanesCodec)
        return step_down(encoded, codec.bits)
    values = encoded.codec.decode(encoded, dtype)
    is_raw = isinstance(codec, RawCodec)
    return codec.adopt(values, encoded.position) if is_raw else codec.encode(values, encoded.position)


def _encodes_nothing(encoded: EncodedArray, codec: Codec) -> bool:
    """Whether the array becomes one of `codec` without encoding anything again."""
    held = encoded.codec
    if isinstance(held, PlanesCodec) and isinstance(codec, PlanesCodec):
        return held.rotation == codec.rotation and codec.bits <= held.bits
    return held == codec
