"""Gather planes of like layers as rows of one array for each plane: [layers, kv_heads, tokens, words].

Encoding goes layer by layer and leaves about ten small arrays for each layer. Metal allows half a million arrays
(`resource_limit`): 1,600 turns of a chat reach that with 32 layers. A gathered span has about ten arrays. A layer's
planes are then views, and reading them copies nothing. A plane that stepping down drops is freed when the last layer
has dropped it. Large arrays stay as they are, because they cannot be many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.base import EncodedArray
from kvstrata.kv.checkpoints import RecurrentState
from kvstrata.kv.own_kv import OwnKV
from kvstrata.kv.span import Span

LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class _SegmentPlanes:
    """K or V of one segment of one layer."""

    layer: int
    number: int  # of the segment in its layer
    side: str  # "k" or "v"
    planes: EncodedArray


def num_arrays(span: Span) -> int:
    """Count the arrays that MLX allocated for sealed tokens and for checkpoints. Rows of one array count once."""
    shared: set[tuple[object, str]] = set()
    count = sum(_count_arrays(state) for checkpoint in span.checkpoints.values() for state in checkpoint.states)
    for each in _all_planes(span):
        if each.planes.gathered is not None:
            shared.update((each.planes.gathered, name) for name in each.planes.arrays)
        else:
            count += len(each.planes.arrays)
    return count + len(shared)


def has_to_gather(span: Span, apart: Collection[int] = ()) -> bool:
    return not span.is_live and bool(_next_group(span, apart))


def gather_some(span: Span, apart: Collection[int] = ()) -> bool:
    """Gather the keys or the values of one group of layers. Return whether there was a group. Layers `apart` may step
    down at another time than the others, so they do not share arrays with the others."""
    group = [] if span.is_live else _next_group(span, apart)
    rows: list[dict[str, mx.array]] = [{} for _ in group]
    for name in group[0].planes.arrays if group else ():
        stacked = mx.stack([each.planes.arrays[name] for each in group])
        views = [row.squeeze(0) for row in mx.split(stacked, len(group))]
        mx.eval(views)
        for arrays, view in zip(rows, views, strict=True):
            arrays[name] = view
    shared = object()
    for each, arrays in zip(group, rows, strict=True):
        _put(span, each, replace(each.planes, arrays=arrays, gathered=shared))
    return bool(group)


def _put(span: Span, each: _SegmentPlanes, planes: EncodedArray) -> None:
    segments = list(span.sealed(each.layer))
    segment = segments[each.number]
    segments[each.number] = SealedSegment(planes, segment.v) if each.side == "k" else SealedSegment(segment.k, planes)
    span.replace(each.layer, segments)


def _next_group(span: Span, apart: Collection[int]) -> list[_SegmentPlanes]:
    """Return planes of several layers that can be gathered and are not; empty: there are none."""
    groups: dict[tuple[Any, ...], list[_SegmentPlanes]] = {}
    for each in _all_planes(span):
        planes = each.planes
        if planes.gathered is None and max(array.nbytes for array in planes.arrays.values()) < LARGE_BYTES:
            groups.setdefault((each.layer in apart, *_group_key(each)), []).append(each)
    return next((group for group in groups.values() if len(group) > 1), [])


def _all_planes(span: Span) -> Iterator[_SegmentPlanes]:
    for layer in span.layers:
        content = span.content(layer)
        for number, segment in enumerate(content.sealed if isinstance(content, OwnKV) else content):
            yield _SegmentPlanes(layer, number, "k", segment.k)
            yield _SegmentPlanes(layer, number, "v", segment.v)


def _group_key(each: _SegmentPlanes) -> tuple[Any, ...]:
    planes = each.planes
    arrays = tuple((name, array.shape, array.dtype) for name, array in planes.arrays.items())
    return each.number, each.side, planes.codec, planes.position, planes.mean_runs, arrays


def _count_arrays(state: Any) -> int:
    if isinstance(state, SealedSegment):
        return len(state.arrays())
    return sum(array is not None for array in state.arrays) if isinstance(state, RecurrentState) else 0
