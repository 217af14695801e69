"""Parts of one layer, put under one codec for K and one for V.

Within a family of codecs this touches as little as it can: planes step down by dropping planes, parts of the same codec
are joined as they are. Everything else is decoded and encoded, which never gains precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import mlx.core as mx

from kvstrata.codecs.base import Codec, Planes
from kvstrata.codecs.planes import Moved, PlanesCodec, step_down
from kvstrata.codecs.raw import RawCodec
from kvstrata.layers.parts import CutPart, Part, Parts, RawPart, SealedPart
from kvstrata.layers.sequence import Pair

# Called with planes that a step down takes away; without one they are dropped.
PutAway = Callable[[Moved], None]


def gather(parts: Sequence[Part], pair: Pair, position: int, dtype: mx.Dtype) -> SealedPart:
    """One part that owns its memory; the first token is at `position` in its sequence."""
    made: list[SealedPart] = []
    at = position
    for is_raw, run in groupby(parts, lambda part: isinstance(part, RawPart)):
        group = list(run)
        if is_raw:
            made.append(_encode_raw(group, pair, at))
        else:
            made += [_convert(part, pair, dtype) for part in group]
        at += sum(part.num_tokens for part in group)
    return joined(made)


def joined(parts: Sequence[SealedPart]) -> SealedPart:
    """Neighbours under the same codecs."""
    whole = parts[0]
    for part in parts[1:]:
        whole = SealedPart(whole.k.codec.join(whole.k, part.k), whole.v.codec.join(whole.v, part.v))
    return whole


def cut(part: SealedPart, start: int, end: int) -> SealedPart:
    """Tokens [start, end), counted from its first, in memory of their own."""
    return SealedPart(part.k.codec.cut(part.k, start, end), part.v.codec.cut(part.v, start, end))


def adopt(k: mx.array, v: mx.array, pair: Pair, position: int) -> SealedPart:
    """Arrays [kv_heads, tokens, dim] that nobody else writes and that have no gaps."""
    return SealedPart(_take(k, pair[0], position), _take(v, pair[1], position))


def convert(planes: Planes, codec: Codec, dtype: mx.Dtype, put_away: PutAway | None = None) -> Planes:
    if planes.codec == codec:
        return planes
    if isinstance(planes.codec, PlanesCodec) and isinstance(codec, PlanesCodec) and codec.bits < planes.codec.bits:
        kept, moved = step_down(planes, codec.bits)
        if put_away is not None:
            put_away(moved)
        return kept
    return _take(planes.codec.decode(planes, dtype), codec, planes.position)


def _convert(part: Part, pair: Pair, dtype: mx.Dtype) -> SealedPart:
    if isinstance(part, CutPart):
        part = cut(part.whole, part.start, part.end)
    assert isinstance(part, SealedPart)
    return SealedPart(convert(part.k, pair[0], dtype), convert(part.v, pair[1], dtype))


def _encode_raw(parts: Sequence[Part], pair: Pair, position: int) -> SealedPart:
    first = parts[0]
    assert isinstance(first, RawPart)
    k, v = Parts((tuple(parts),)).joined(first.k_buffer)
    if len(parts) > 1:
        return adopt(k[0], v[0], pair, position)
    # A range of a buffer: what stays must not keep it alive.
    return SealedPart(pair[0].encode(k[0], position), pair[1].encode(v[0], position))


def _take(array: mx.array, codec: Codec, position: int) -> Planes:
    return codec.adopt(array, position) if isinstance(codec, RawCodec) else codec.encode(array, position)
