"""Convert segments of one layer to one codec for K and one for V.

Within a family of codecs conversion changes as little as possible: planes step down by dropping planes, and segments of
the same codec are joined as they are. Everything else is decoded and encoded, which never gains precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import takewhile

import mlx.core as mx

from kvstrata.attention.segments import CutPart, Part, Parts, RawPart, SealedPart, cut_parts
from kvstrata.codecs.base import Codec, Planes
from kvstrata.codecs.planes import PlanesCodec, step_down
from kvstrata.codecs.raw import RawCodec
from kvstrata.kv.sequence_cache import Pair
from kvstrata.kv.work_sizes import Grain, ranges

RAW: Pair = (RawCodec(), RawCodec())


def next_piece(
    parts: Sequence[Part], start: int, pair: Pair, dtype: mx.Dtype, grain: Grain, *, upward: bool
) -> SealedPart:
    """Convert the first tokens of consecutive segments to a pair of codecs, in memory of their own: as many tokens as
    one step handles. The first token is at position `start`.

    Tokens in fewer bits than `pair` keep their codec, unless `upward`: more bits would restore nothing.
    """
    part = parts[0]
    if isinstance(part, RawPart):
        # Buffers end anywhere: a codec's group may be in two of them.
        raw = list(takewhile(lambda each: isinstance(each, RawPart), parts))
        num_tokens = _step_tokens(start, sum(each.num_tokens for each in raw), grain, encodes=pair != RAW)
        k, v = Parts((tuple(cut_parts(raw, 0, num_tokens)),)).joined(part.k_buffer)
        return SealedPart(pair[0].encode(k.squeeze(0), start), pair[1].encode(v.squeeze(0), start))
    whole, first = (part.whole, part.start) if isinstance(part, CutPart) else (part, 0)
    assert isinstance(whole, SealedPart)
    k, v = new_pair(whole, pair, dtype, upward=upward)
    encodes = not (_is_cheap(whole.k, k) and _is_cheap(whole.v, v))
    if part is whole and not encodes:
        return whole if (k, v) == _codecs(whole) else SealedPart(convert(whole.k, k, dtype), convert(whole.v, v, dtype))
    end = first + _step_tokens(start, part.num_tokens, grain, encodes=encodes)
    return SealedPart(_converted(whole.k, first, end, k, dtype), _converted(whole.v, first, end, v, dtype))


def _step_tokens(start: int, num_tokens: int, grain: Grain, *, encodes: bool) -> int:
    first, end = next(ranges(start, start + num_tokens, grain.piece_tokens if encodes else grain.part_tokens))
    return end - first


def becomes(held: Codec, wanted: Codec, dim: int, dtype: mx.Dtype, *, upward: bool = False) -> Codec:
    """Return the codec that `held` becomes where `wanted` is asked for: never more bits than `held`, unless `upward`.
    Planes keep their means: only tokens that are encoded anew get the means of `wanted`."""
    if isinstance(held, PlanesCodec) and isinstance(wanted, PlanesCodec) and wanted.bits <= held.bits:
        return dataclasses.replace(held, bits=wanted.bits)
    return wanted if upward or bits_of(wanted, dim, dtype) < bits_of(held, dim, dtype) else held


def new_pair(part: SealedPart, pair: Pair, dtype: mx.Dtype, *, upward: bool = False) -> Pair:
    """Return the codecs that a segment would be converted to."""
    k, v = _codecs(part)
    return (
        becomes(k, pair[0], part.k.dim, dtype, upward=upward),
        becomes(v, pair[1], part.v.dim, dtype, upward=upward),
    )


def stays(part: SealedPart, pair: Pair, dtype: mx.Dtype, *, upward: bool = False) -> bool:
    """Whether a segment would stay as it is."""
    return new_pair(part, pair, dtype, upward=upward) == _codecs(part)


def lowered(part: SealedPart, pair: Pair, dtype: mx.Dtype) -> SealedPart:
    """Convert a whole segment at once, never to more bits than it has."""
    k, v = new_pair(part, pair, dtype)
    return SealedPart(convert(part.k, k, dtype), convert(part.v, v, dtype))


def live_pair(part: SealedPart, pair: Pair) -> Pair:
    """Return the codecs for a sealed segment of a running sequence: first tokens, which were sealed raw, stay raw."""
    return RAW if _codecs(part) == RAW else pair


def bits_of(codec: Codec, dim: int, dtype: mx.Dtype) -> float:
    """Return the bits of a value as allocated in memory, where raw is the dtype that the model computes in."""
    return 8.0 * dtype.size if isinstance(codec, RawCodec) else codec.bits_per_value(dim)


def _codecs(part: SealedPart) -> Pair:
    return part.k.codec, part.v.codec


def owned(part: Part) -> SealedPart:
    """Return a sealed segment as it is, and a cut of one in memory of its own."""
    if isinstance(part, CutPart):
        return SealedPart(part.whole.k.cut(part.start, part.end), part.whole.v.cut(part.start, part.end))
    assert isinstance(part, SealedPart), "what its owner still writes is not sealed"
    return part


def convert(planes: Planes, codec: Codec, dtype: mx.Dtype) -> Planes:
    if planes.codec == codec:
        return planes
    if _is_cheap(planes, codec):
        assert isinstance(codec, PlanesCodec)
        return step_down(planes, codec.bits)
    return _take(planes.codec.decode(planes, dtype), codec, planes.position)


def _is_cheap(planes: Planes, codec: Codec) -> bool:
    """Whether a conversion encodes nothing anew."""
    held = planes.codec
    if isinstance(held, PlanesCodec) and isinstance(codec, PlanesCodec):
        return held.turn == codec.turn and codec.bits <= held.bits
    return held == codec


def _converted(planes: Planes, start: int, end: int, codec: Codec, dtype: mx.Dtype) -> Planes:
    """Convert tokens [start, end) of planes, counted from the first one of the planes."""
    if (start, end) == (0, planes.num_tokens):
        return convert(planes, codec, dtype)
    if isinstance(planes.codec, RawCodec) and codec != planes.codec:
        return codec.encode(planes.arrays["values"][:, start:end], planes.position + start)
    return convert(planes.cut(start, end), codec, dtype)


def _take(array: mx.array, codec: Codec, position: int) -> Planes:
    return codec.adopt(array, position) if isinstance(codec, RawCodec) else codec.encode(array, position)
