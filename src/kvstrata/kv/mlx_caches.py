"""Conversion of mlx-lm's prompt caches to spans and back, so that either side can resume from the other's cache.

Exactly filled buffers and packed values of a quantized cache are taken as they are. Other arrays are copied once, so
that neither side keeps the other's memory alive or sees its writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentSlice
from kvstrata.codecs.affine import AffineCodec
from kvstrata.codecs.base import EncodedArray, MismatchedArrays, copy_rows
from kvstrata.codecs.raw import RawCodec
from kvstrata.kv.buffers import owned
from kvstrata.kv.checkpoints import Checkpoint, LayerState, RecurrentState, needs_checkpoints, states_at
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.span import LayerContent, Span, SpanRange, compact_segment
from kvstrata.kv.work_sizes import join_segments

QuantizedArrays = tuple[mx.array, mx.array, mx.array]  # packed values, scales, biases

# Exact types: a subclass may keep its state elsewhere.
CACHE_CLASSES: dict[str, tuple[type, ...]] = {
    "full": (KVCache, QuantizedKVCache),
    "window": (RotatingKVCache,),
    "chunked": (ChunkedKVCache,),
    "recurrent": (ArraysCache,),
}


def adopt_mlx_lm(layout: Layout, caches: Sequence[Any], num_tokens: int) -> Span:
    """Return a prompt cache of `num_tokens` as a span, with a checkpoint of window and recurrent layers at its end.

    Raises MismatchedArrays where the caches are not those of this model and this many tokens.
    """
    if num_tokens < 1:
        raise MismatchedArrays(f"A prompt cache of {num_tokens} tokens has nothing to resume from.")
    flat = [child for cache in caches for child in (cache.caches if isinstance(cache, CacheList) else (cache,))]
    specs = layout.flat()
    if len(flat) != len(specs):
        raise MismatchedArrays(f"The prompt cache is another model's: it has {len(flat)} layers, not {len(specs)}.")
    contents: dict[int, LayerContent] = {}
    states: list[LayerState] = []
    for i, (spec, cache) in enumerate(zip(specs, flat, strict=True)):
        state = adopt_layer(spec, cache, num_tokens, i)
        if spec.kind == "full":
            assert isinstance(state, SealedSegment)
            contents[i] = (state,)
        states.append(None if spec.kind == "full" else state)
    span = Span(layout, 0, num_tokens, contents)
    if needs_checkpoints(layout):
        span.checkpoints[num_tokens] = Checkpoint(num_tokens, tuple(states))
    return span


def to_mlx_lm(layout: Layout, ranges: Sequence[SpanRange], checkpoint: Checkpoint | None) -> list[Any]:
    """Return a prompt cache for `mlx_lm.generate`, after `ranges`, which start at 0 and are consecutive.

    A layer whose tokens all have one affine codec becomes a QuantizedKVCache; other codecs are decoded.
    """
    num_tokens = ranges[-1].end
    states = states_at(layout, checkpoint, num_tokens)
    made = iter([_to_layer(spec, i, ranges, states[i], num_tokens) for i, spec in enumerate(layout.flat())])
    return [CacheList(*(next(made) for _ in spec.children)) if spec.children else next(made) for spec in layout.layers]


# From mlx-lm.


def adopt_layer(spec: LayerSpec, cache: Any, num_tokens: int, index: int) -> LayerState:
    """Return the content of one layer. Raises MismatchedArrays."""
    if type(cache) not in CACHE_CLASSES.get(spec.kind, ()):
        raise MismatchedArrays(f"Layer {index} is of kind {spec.kind}: no {type(cache).__name__} can be adopted there.")
    if spec.kind == "recurrent":
        return _from_arrays(spec, cache, index)
    if cache.offset != num_tokens:
        raise MismatchedArrays(f"Layer {index} holds {cache.offset} tokens, not {num_tokens}.")
    if spec.kind == "window":
        segment = _from_rotating(spec, cache, index)
    elif spec.kind == "chunked":
        segment = _from_chunked(spec, cache, index)
    elif hasattr(cache, "bits"):
        codec = AffineCodec(cache.bits, cache.group_size)
        segment = SealedSegment(*(_from_packed(codec, arrays, num_tokens) for arrays in (cache.keys, cache.values)))
    else:
        segment = SealedSegment(_from_buffer(cache.keys, num_tokens), _from_buffer(cache.values, num_tokens))
    _check_shape(spec, segment, index)
    return segment


def _from_buffer(buffer: mx.array, num_tokens: int) -> EncodedArray:
    """Take or copy the first tokens of a buffer [1, kv_heads, size, dim]."""
    values = _only_row(buffer)
    if values.shape[1] == num_tokens:
        return RawCodec().adopt(values)
    return RawCodec().encode(values[:, :num_tokens])


def _from_packed(codec: AffineCodec, arrays: QuantizedArrays, num_tokens: int) -> EncodedArray:
    rows = [_only_row(array) for array in arrays]
    trimmed = [row if row.shape[1] == num_tokens else copy_rows(row, 0, num_tokens) for row in rows]
    mx.eval(trimmed)
    packed, scales, biases = trimmed
    return codec.adopt(packed, scales, biases)


def _from_rotating(spec: LayerSpec, cache: Any, index: int) -> SealedSegment:
    if (cache.max_size, cache.keep) != (spec.max_size, spec.keep):
        raise MismatchedArrays(
            f"Layer {index} is a window of {spec.max_size} tokens that keeps {spec.keep}, "
            f"not one of {cache.max_size} that keeps {cache.keep}."
        )
    # First tokens that are never overwritten, then the newest. After a long chunk mlx-lm's buffer has older ones too.
    kept = min(spec.keep, cache.offset)
    newest = min(cache.offset, spec.max_size) - kept
    sides = []
    for buffer in (cache.keys, cache.values):
        ordered = _only_row(cache._temporal_order(buffer))
        last = ordered.shape[1]
        parts = [ordered[:, a:b] for a, b in ((0, kept), (last - newest, last)) if a < b]
        values = mx.concatenate(parts, axis=1) if len(parts) > 1 else owned(parts[0])
        sides.append(RawCodec().adopt(values, cache.offset - kept - newest))
    return SealedSegment(*sides)


def _from_chunked(spec: LayerSpec, cache: Any, index: int) -> SealedSegment:
    """Copy the newest token's chunk: mlx-lm's buffer also has the end of the chunk before it."""
    valid, count = cache.offset - cache.start_position, (cache.offset - 1) % spec.max_size + 1
    if cache.chunk_size != spec.max_size or valid < count:
        raise MismatchedArrays(f"Layer {index} has chunks of {spec.max_size} tokens, not of {cache.chunk_size}.")
    rows = [_only_row(buffer)[:, valid - count : valid] for buffer in (cache.keys, cache.values)]
    return SealedSegment(*(RawCodec().encode(row, cache.offset - count) for row in rows))


def _from_arrays(spec: LayerSpec, cache: Any, index: int) -> RecurrentState:
    if len(cache.cache) != spec.num_arrays or all(array is None for array in cache.cache):
        raise MismatchedArrays(
            f"Layer {index} has a state of {spec.num_arrays} arrays, not {len(cache.cache)} or empty."
        )
    state = RecurrentState(tuple(None if array is None else owned(array) for array in cache.cache))
    mx.eval([array for array in state.arrays if array is not None])
    if state.nbytes != spec.state_bytes:
        raise MismatchedArrays(f"Layer {index} has a state of {spec.state_bytes} bytes, not {state.nbytes}.")
    return state


def _only_row(array: mx.array) -> mx.array:
    if array.shape[0] != 1:
        raise MismatchedArrays(f"A prompt cache of {array.shape[0]} sequences: give one at a time (`extract`).")
    return array.squeeze(0)


def _check_shape(spec: LayerSpec, segment: SealedSegment, index: int) -> None:
    got = (segment.num_heads, segment.k.dim, segment.v.dim)
    if got != (spec.kv_heads, spec.k_dim, spec.v_dim):
        raise MismatchedArrays(
            f"Layer {index} has {spec.kv_heads} heads of {spec.k_dim} and {spec.v_dim} values, not {got}: "
            "the prompt cache is another model's."
        )
    sides = (segment.k, segment.v)
    dtypes = {side.arrays["values"].dtype for side in sides if isinstance(side.codec, RawCodec)}
    if dtypes - {spec.dtype}:
        raise MismatchedArrays(
            f"Layer {index} computes in {spec.dtype}, not in {', '.join(sorted(map(str, dtypes)))}: make the prompt "
            "cache with the model as it is loaded here."
        )


# To mlx-lm.


def _to_layer(spec: LayerSpec, index: int, ranges: Sequence[SpanRange], state: Any, num_tokens: int) -> Any:
    if spec.kind != "full":
        return to_mlx_cache(spec, index, state, num_tokens)
    segments = [segment for each in ranges for segment in each.span.segments(index, each.start, each.end)]
    return _to_kv_cache(spec, segments, num_tokens)


def to_mlx_cache(spec: LayerSpec, index: int, state: Any, num_tokens: int) -> Any:
    """Return mlx-lm's cache of a window, chunked or recurrent layer, from the state that `states_at` returned."""
    if spec.kind == "recurrent":
        arrays = ArraysCache(spec.num_arrays)
        arrays.cache = list(state)
        return arrays
    if spec.kind == "window":
        ring: Any = RotatingKVCache(spec.max_size, keep=spec.keep)
        ring.keys, ring.values = state
        ring.offset, ring._idx = num_tokens, ring.keys.shape[2]
        return ring
    if spec.kind == "chunked":
        k, v = state
        return _to_chunked(spec, k, v, num_tokens)
    raise MismatchedArrays(f"Layer {index} is of kind {spec.kind}, which cannot be given to mlx-lm.")


def _to_chunked(spec: LayerSpec, k: mx.array, v: mx.array, num_tokens: int) -> Any:
    chunked: Any = ChunkedKVCache(spec.max_size)
    past = num_tokens % spec.max_size
    chunked.offset, chunked.start_position = num_tokens, num_tokens - past
    if past:
        chunked.keys, chunked.values = owned(k[:, :, :past]), owned(v[:, :, :past])
    return chunked


def _to_kv_cache(spec: LayerSpec, segments: Sequence[Segment], num_tokens: int) -> Any:
    codec = common_affine(segments)
    if codec is not None:
        whole = join_segments([compact_segment(segment) for segment in segments])
        cache: Any = QuantizedKVCache(codec.group, codec.bits)
        cache.keys, cache.values = (_to_packed(codec, side, spec.dtype) for side in (whole.k, whole.v))
    else:
        cache = KVCache()
        k, v = segments_to_arrays(segments, spec.dtype)
        # A view of a buffer or of a slice must not keep the whole alive, so it is copied.
        is_whole = len(segments) > 1 or isinstance(segments[0], SealedSegment)
        cache.keys, cache.values = (k, v) if is_whole else (owned(k), owned(v))
        mx.eval(cache.keys, cache.values)
    cache.offset = num_tokens
    return cache


def common_affine(segments: Sequence[Segment]) -> AffineCodec | None:
    """Return the affine codec that all K and V have, as in a QuantizedKVCache; None: there is no such codec."""
    wholes = [segment.whole if isinstance(segment, SegmentSlice) else segment for segment in segments]
    if any(isinstance(segment, RawSegment) for segment in wholes):
        return None
    codecs = {side.codec for whole in wholes if isinstance(whole, SealedSegment) for side in (whole.k, whole.v)}
    only = next(iter(codecs))
    return only if len(codecs) == 1 and isinstance(only, AffineCodec) else None


def _to_packed(codec: AffineCodec, encoded: EncodedArray, dtype: mx.Dtype) -> QuantizedArrays:
    """Return the arrays in mlx-lm's form, which has scales in the dtype that the model computes in."""
    packed, scales, biases = codec.yield_tuple(encoded)
    made = packed[None], scales.astype(dtype)[None], biases.astype(dtype)[None]
    mx.eval(made)
    return made
