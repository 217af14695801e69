"""Planes of layers that are stored alike, as rows of one array for each plane: [layers, kv_heads, tokens, words].

Encoding goes layer by layer, which leaves about ten small arrays for each layer. Metal counts them, and stops at half a
million (`resource_limit`): 36 GB of four-bit conversations have more. Gathered, a span has about ten. A layer's planes
are then views: reading them copies nothing, and what stepping down drops goes when the last layer has dropped it. Large
arrays stay as they are, because they cannot be many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvstrata.attention.parts import SealedPart
from kvstrata.codecs.base import Planes
from kvstrata.spans.span import Span

LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class _Place:
    layer: int
    number: int  # of the part in its layer
    side: str  # "k" or "v"
    planes: Planes


def num_arrays(span: Span) -> int:
    """That MLX allocated for what is sealed: rows of one array count once."""
    shared: set[tuple[Any, ...]] = set()
    count = 0
    for place in _places(span):
        if place.planes.is_gathered:
            shared.update((*_likeness(place), name) for name in place.planes.arrays)
        else:
            count += len(place.planes.arrays)
    return count + len(shared)


def is_gathered(span: Span) -> bool:
    return not _apart(span)


def gathering(span: Span) -> Iterator[None]:
    """A plane of all layers at a time. Where the span is changed meanwhile, the rest is left for another time."""
    version = span.version
    for places in _apart(span):
        rows: list[dict[str, mx.array]] = [{} for _ in places]
        for name in places[0].planes.arrays:
            if span.version != version:
                return
            stacked = mx.stack([place.planes.arrays[name] for place in places])
            views = [row.squeeze(0) for row in mx.split(stacked, len(places))]
            mx.eval(views)
            for arrays, view in zip(rows, views, strict=True):
                arrays[name] = view
            yield
        if span.version != version:
            return
        for place, arrays in zip(places, rows, strict=True):
            _put(span, place, replace(place.planes, arrays=arrays, is_gathered=True))
        version = span.version


def _put(span: Span, place: _Place, planes: Planes) -> None:
    parts = list(span.planes(place.layer))
    part = parts[place.number]
    parts[place.number] = SealedPart(planes, part.v) if place.side == "k" else SealedPart(part.k, planes)
    span.replace(place.layer, parts)


def _apart(span: Span) -> list[list[_Place]]:
    """Planes of several layers that could be gathered, and are not."""
    groups: dict[tuple[Any, ...], list[_Place]] = {}
    for place in _places(span):
        planes = place.planes
        if not planes.is_gathered and max(array.nbytes for array in planes.arrays.values()) < LARGE_BYTES:
            groups.setdefault(_likeness(place), []).append(place)
    return [places for places in groups.values() if len(places) > 1]


def _places(span: Span) -> Iterator[_Place]:
    for layer in () if span.is_live else span.layers:
        for number, part in enumerate(span.planes(layer)):
            yield _Place(layer, number, "k", part.k)
            yield _Place(layer, number, "v", part.v)


def _likeness(place: _Place) -> tuple[Any, ...]:
    planes = place.planes
    arrays = tuple((name, array.shape, array.dtype) for name, array in planes.arrays.items())
    return place.number, place.side, planes.codec, planes.position, planes.segments, arrays
