"""Parts of one layer, put under one codec for K and one for V.

Within a family of codecs this touches as little as it can: planes step down by dropping planes, parts of the same codec
are joined as they are. Everything else is decoded and encoded, which never gains precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import mlx.core as mx

from kvstrata.codecs.base import Codec, Planes
from kvstrata.codecs.planes import PlanesCodec, step_down
from kvstrata.codecs.raw import RawCodec
from kvstrata.layers.parts import CutPart, Part, Parts, RawPart, SealedPart
from kvstrata.layers.sequence import Pair


def gather(
    parts: Sequence[Part],
    pair: Pair,
    position: int,
    dtype: mx.Dtype,
    *,
    upward: bool = False,
) -> tuple[SealedPart, ...]:
    """As few parts as there are precisions, each in memory of its own; the first token is at `position`.

    What is stored in fewer bits than `pair` stays so, unless `upward`: more bits would bring nothing back.
    """
    made: list[SealedPart] = []
    at = position
    for is_raw, run in groupby(parts, lambda part: isinstance(part, RawPart)):
        group = list(run)
        if is_raw:
            made.append(_encode_raw(group, pair, at))
        else:
            made += [_convert(part, pair, dtype, upward=upward) for part in group]
        at += sum(part.num_tokens for part in group)
    return tuple(joined(list(run)) for _, run in groupby(made, _codecs))


def joined(parts: Sequence[SealedPart]) -> SealedPart:
    """Neighbours under the same codecs."""
    whole = parts[0]
    for part in parts[1:]:
        whole = SealedPart(whole.k.codec.join(whole.k, part.k), whole.v.codec.join(whole.v, part.v))
    return whole


def lower_of(held: Codec, wanted: Codec, dim: int, dtype: mx.Dtype) -> Codec:
    """What `held` becomes where `wanted` is asked for: never more bits than it has."""
    return wanted if bits_of(wanted, dim, dtype) < bits_of(held, dim, dtype) else held


def lowered(part: SealedPart, pair: Pair, dtype: mx.Dtype) -> SealedPart:
    """A part of a running sequence. Its first tokens, which were sealed raw, stay so."""
    k, v = lower_pair(part, pair, dtype)
    return SealedPart(convert(part.k, k, dtype), convert(part.v, v, dtype))


def lower_pair(part: SealedPart, pair: Pair, dtype: mx.Dtype) -> Pair:
    """What the codecs of a running sequence's part become."""
    held = _codecs(part)
    if held == (RawCodec(), RawCodec()):
        return held
    return lower_of(held[0], pair[0], part.k.dim, dtype), lower_of(held[1], pair[1], part.v.dim, dtype)


def bits_of(codec: Codec, dim: int, dtype: mx.Dtype) -> float:
    """As allocated in memory, where raw is what the model computes in."""
    return 8.0 * dtype.size if isinstance(codec, RawCodec) else codec.bits_per_value(dim)


def _codecs(part: SealedPart) -> Pair:
    return part.k.codec, part.v.codec


def cut(part: SealedPart, start: int, end: int) -> SealedPart:
    """Tokens [start, end), counted from its first, in memory of their own."""
    return SealedPart(part.k.codec.cut(part.k, start, end), part.v.codec.cut(part.v, start, end))


def adopt(k: mx.array, v: mx.array, pair: Pair, position: int) -> SealedPart:
    """Arrays [kv_heads, tokens, dim] that nobody else writes and that have no gaps."""
    return SealedPart(_take(k, pair[0], position), _take(v, pair[1], position))


def convert(planes: Planes, codec: Codec, dtype: mx.Dtype) -> Planes:
    if planes.codec == codec:
        return planes
    if isinstance(planes.codec, PlanesCodec) and isinstance(codec, PlanesCodec) and codec.bits < planes.codec.bits:
        return step_down(planes, codec.bits).kept
    return _take(planes.codec.decode(planes, dtype), codec, planes.position)


def _convert(part: Part, pair: Pair, dtype: mx.Dtype, *, upward: bool) -> SealedPart:
    if isinstance(part, CutPart):
        part = cut(part.whole, part.start, part.end)
    assert isinstance(part, SealedPart)
    k, v = pair
    if not upward:
        k = lower_of(part.k.codec, k, part.k.dim, dtype)
        v = lower_of(part.v.codec, v, part.v.dim, dtype)
    return SealedPart(convert(part.k, k, dtype), convert(part.v, v, dtype))


def _encode_raw(parts: Sequence[Part], pair: Pair, position: int) -> SealedPart:
    first = parts[0]
    assert isinstance(first, RawPart)
    k, v = Parts((tuple(parts),)).joined(first.k_buffer)
    k, v = k.squeeze(0), v.squeeze(0)
    if len(parts) > 1:
        return adopt(k, v, pair, position)
    # A range of a buffer: what stays must not keep it alive.
    return SealedPart(pair[0].encode(k, position), pair[1].encode(v, position))


def _take(array: mx.array, codec: Codec, position: int) -> Planes:
    return codec.adopt(array, position) if isinstance(codec, RawCodec) else codec.encode(array, position)
