"""Estimates of a change of precision, without making it: bytes that it would free, and accuracy that it would cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import mlx.core as mx

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.attention.segments import SealedSegment, Segment
from kvstrata.codecs.base import Codec, EncodedArray, Extent
from kvstrata.codecs.mean_runs import runs_of
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.kv.checkpoints import Checkpoint
from kvstrata.kv.layout import LayerSpec
from kvstrata.kv.own_kv import OwnKV
from kvstrata.kv.precision_plan import RAW, CodecPair, PrecisionPlan
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.span import Span
from kvstrata.kv.transcode import ENCODE_TOKENS, becomes, codecs_after, live_codecs

# Reasons why bytes would not change.
SAME_PRECISION = "already in this precision"

LOWER = "already lower, and no plane is archived"

RAW_WINDOW = "raw window of a running request"

SAMPLE_TOKENS = 256

SAMPLE_QUERIES = 16


@dataclass
class Estimate:
    bytes_before: int = 0
    bytes_after: int = 0
    left_alone: Counter[str] = field(default_factory=Counter)  # bytes by reason

    @property
    def changes(self) -> bool:
        return self.bytes_before != self.bytes_after


def estimate(span: Span, plan: PrecisionPlan, *, upward: bool, window: RawWindow | None) -> Estimate:
    """Estimate a change of a span. `window` stays raw; None: the owner has ended, and all tokens may be encoded."""
    result = Estimate()
    specs = span.layout.flat()
    for layer in span.layers:
        content, pair, dtype = span.content(layer), plan.pairs[layer], specs[layer].dtype
        if not isinstance(content, OwnKV):
            for segment in content:
                _add_segment(result, segment, pair, dtype, upward)
        elif window is not None:
            _add_live(result, content, pair, dtype, window)
        else:
            _add_ended(result, content, span, pair, dtype)
    if window is None:
        for checkpoint in span.checkpoints.values():
            for ring, pair, spec in _rings(checkpoint, plan, specs):
                _add_segment(result, ring, pair, spec.dtype, upward=False)
    return result


def _rings(
    checkpoint: Checkpoint, plan: PrecisionPlan, specs: Sequence[LayerSpec]
) -> Iterator[tuple[SealedSegment, CodecPair, LayerSpec]]:
    """Yield the rings and chunks of a checkpoint: recurrent states are never quantized."""
    for state, pair, spec in zip(checkpoint.states, plan.pairs, specs, strict=True):
        if isinstance(state, SealedSegment):
            yield state, pair, spec


@lru_cache(maxsize=4096)  # the layers of a span are alike, and a change may concern hundreds of spans
def encoded_bytes(codec: Codec, heads: int, dim: int, position: int, num_tokens: int, dtype: mx.Dtype) -> int:
    """Return the bytes that `codec` allocates for `num_tokens` tokens."""
    num_mean_runs = len(runs_of(position, num_tokens)) if isinstance(codec, PlanesCodec) else 0
    planes = codec.layout(Extent(dim, num_tokens, num_mean_runs)).values()
    sizes = [dtype.size if isinstance(codec, RawCodec) else plane.dtypes[0].size for plane in planes]
    return heads * sum(plane.rows * plane.width * size for plane, size in zip(planes, sizes, strict=True))


def _add_segment(result: Estimate, segment: SealedSegment, pair: CodecPair, dtype: mx.Dtype, upward: bool) -> None:
    _add_array(result, segment.k, pair[0], dtype, upward)
    _add_array(result, segment.v, pair[1], dtype, upward)


def _add_array(result: Estimate, encoded: EncodedArray, wanted: Codec, dtype: mx.Dtype, upward: bool) -> None:
    codec = becomes(encoded.codec, wanted, encoded.dim, dtype, upward=upward)
    result.bytes_before += encoded.nbytes
    if codec == encoded.codec:
        result.bytes_after += encoded.nbytes
        result.left_alone[SAME_PRECISION if codec.name == wanted.name else LOWER] += encoded.nbytes
        return
    (heads,) = encoded.leading
    result.bytes_after += encoded_bytes(codec, heads, encoded.dim, encoded.position, encoded.num_tokens, dtype)


def _add_live(result: Estimate, own: OwnKV, pair: CodecPair, dtype: mx.Dtype, window: RawWindow) -> None:
    """Add the own tokens of a running sequence, whose buffers keep the newest tokens and free slots."""
    for segment in own.sealed:
        _add_segment(result, segment, codecs_after(segment, live_codecs(segment, pair), dtype), dtype, upward=False)
    buffers, recent_tokens = own.buffers, window.recent_tokens
    buffer_bytes = buffers.nbytes
    result.bytes_before += buffer_bytes
    raw = buffers.num_tokens
    moved = own.num_to_encode(window)
    if moved < ENCODE_TOKENS or pair == RAW:
        result.bytes_after += buffer_bytes
        result.left_alone[RAW_WINDOW] += buffers.token_bytes * raw
        return
    at = own.end - recent_tokens - moved
    first = raw - moved - recent_tokens  # sealed raw
    buffer_tokens = buffers.size_for(recent_tokens)
    result.left_alone[RAW_WINDOW] += buffers.token_bytes * (raw - moved)
    result.bytes_after += buffers.token_bytes * (first + buffer_tokens) + _encoded_pair(own, pair, at, moved, dtype)


def _add_ended(result: Estimate, own: OwnKV, span: Span, pair: CodecPair, dtype: mx.Dtype) -> None:
    """Add the KV of an owner that has ended. Transcoding keeps the committed tokens only, without free slots."""
    sealed = Estimate()
    for segment in own.sealed:
        _add_segment(sealed, segment, pair, dtype, upward=False)
    raw = max(0, span.num_tokens - own.sealed_tokens)
    result.bytes_before += own.nbytes
    result.bytes_after += sealed.bytes_after
    if raw:
        result.bytes_after += _encoded_pair(own, pair, span.end - raw, raw, dtype)


def _encoded_pair(own: OwnKV, pair: CodecPair, position: int, num_tokens: int, dtype: mx.Dtype) -> int:
    return sum(
        encoded_bytes(codec, array.shape[1], array.shape[3], position, num_tokens, dtype)
        for codec, array in zip(pair, own.buffers.arrays()[:2], strict=True)
    )


def score_error(span: Span, plan: PrecisionPlan, *, upward: bool) -> float | None:
    """Return the error of attention scores relative to their spread over tokens; None: no sampled layer would change.

    Measured in the first, middle and last layer, over some of the newest tokens, with keys in place of queries.
    """
    layers = span.layers
    errors = [_layer_error(span, i, plan.pairs[i], upward) for i in {layers[0], layers[len(layers) // 2], layers[-1]}]
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else None


def _layer_error(span: Span, layer: int, pair: CodecPair, upward: bool) -> float | None:
    dtype = span.layout.flat()[layer].dtype
    start = max(span.position, span.end - SAMPLE_TOKENS)
    segments = span.segments(layer, start, span.end)
    codec = _becomes(segments[-1], pair[0], dtype, upward)
    if codec is None:
        return None
    k, _ = segments_to_arrays(segments, dtype)
    after = codec.decode(codec.encode(k[0], start), mx.float32)
    keys = k[0].astype(mx.float32)  # [heads, tokens, dim]
    queries = keys[:, :: max(1, keys.shape[1] // SAMPLE_QUERIES)]
    exact, moved = queries @ keys.swapaxes(-1, -2), queries @ after.swapaxes(-1, -2)
    spread = exact - exact.mean(axis=-1, keepdims=True)
    error = mx.sqrt(mx.mean((moved - exact) ** 2) / mx.maximum(mx.mean(spread**2), 1e-12))
    return float(error.item())  # pyright: ignore[reportArgumentType]


def _becomes(segment: Segment, wanted: Codec, dtype: mx.Dtype, upward: bool) -> Codec | None:
    """Return the codec that keys would be encoded with; None: the keys stay as they are."""
    if not isinstance(segment, SealedSegment):
        return None if isinstance(wanted, RawCodec) else wanted
    codec = becomes(segment.k.codec, wanted, segment.k.dim, dtype, upward=upward)
    return None if codec == segment.k.codec else codec
