"""Gather planes of like layers as rows of one array for each plane: [layers, kv_heads, tokens, words].

Encoding goes layer by layer and leaves about ten small arrays for each layer. Metal allows half a million arrays
(`resource_limit`): 1,600 turns of a chat reach that with 32 layers. A gathered span has about ten arrays. A layer's
planes are then views, and reading them copies nothing. A plane that stepping down drops is freed when the last layer
has dropped it. Large arrays stay as they are, because they cannot be many.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvstrata.attention.segments import SealedPart
from kvstrata.codecs.base import Planes
from kvstrata.kv.checkpoints import RecurrentState
from kvstrata.kv.own_kv import OwnKV
from kvstrata.kv.span import Span

LARGE_BYTES = 1 << 20

_numbers = itertools.count(1)


@dataclass(frozen=True)
class _Place:
    layer: int
    number: int  # of the segment in its layer
    side: str  # "k" or "v"
    planes: Planes


def num_arrays(span: Span) -> int:
    """Count the arrays that MLX allocated for sealed tokens and for checkpoints. Rows of one array count once."""
    shared: set[tuple[int, str]] = set()
    count = sum(_mark_arrays(state) for mark in span.checkpoints.values() for state in mark.states)
    for place in _places(span):
        if place.planes.gathered:
            shared.update((place.planes.gathered, name) for name in place.planes.arrays)
        else:
            count += len(place.planes.arrays)
    return count + len(shared)


def has_to_gather(span: Span, apart: Collection[int] = ()) -> bool:
    return not span.is_live and bool(_next_group(span, apart))


def gather_some(span: Span, apart: Collection[int] = ()) -> bool:
    """Gather the keys or the values of one group of layers. Return whether there was a group. Layers `apart` may step
    down at another time than the others, so they do not share arrays with the others."""
    places = [] if span.is_live else _next_group(span, apart)
    rows: list[dict[str, mx.array]] = [{} for _ in places]
    for name in places[0].planes.arrays if places else ():
        stacked = mx.stack([place.planes.arrays[name] for place in places])
        views = [row.squeeze(0) for row in mx.split(stacked, len(places))]
        mx.eval(views)
        for arrays, view in zip(rows, views, strict=True):
            arrays[name] = view
    number = next(_numbers)
    for place, arrays in zip(places, rows, strict=True):
        _put(span, place, replace(place.planes, arrays=arrays, gathered=number))
    return bool(places)


def _put(span: Span, place: _Place, planes: Planes) -> None:
    parts = list(span.sealed(place.layer))
    part = parts[place.number]
    parts[place.number] = SealedPart(planes, part.v) if place.side == "k" else SealedPart(part.k, planes)
    span.replace(place.layer, parts)


def _next_group(span: Span, apart: Collection[int]) -> list[_Place]:
    """Return planes of several layers that can be gathered and are not; empty: there are none."""
    groups: dict[tuple[Any, ...], list[_Place]] = {}
    for place in _places(span):
        planes = place.planes
        if not planes.gathered and max(array.nbytes for array in planes.arrays.values()) < LARGE_BYTES:
            groups.setdefault((place.layer in apart, *_likeness(place)), []).append(place)
    return next((places for places in groups.values() if len(places) > 1), [])


def _places(span: Span) -> Iterator[_Place]:
    for layer in span.layers:
        held = span.content(layer)
        for number, part in enumerate(held.sealed if isinstance(held, OwnKV) else held):
            yield _Place(layer, number, "k", part.k)
            yield _Place(layer, number, "v", part.v)


def _likeness(place: _Place) -> tuple[Any, ...]:
    planes = place.planes
    arrays = tuple((name, array.shape, array.dtype) for name, array in planes.arrays.items())
    return place.number, place.side, planes.codec, planes.position, planes.segments, arrays


def _mark_arrays(state: Any) -> int:
    if isinstance(state, SealedPart):
        return len(state.arrays())
    return sum(array is not None for array in state.arrays) if isinstance(state, RecurrentState) else 0
