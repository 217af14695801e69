"""Gather planes of like layers as rows of one array for each plane: [layers, kv_heads, tokens, words].

Encoding goes layer by layer and leaves about ten small arrays for each layer. Metal allows half a million arrays
(`resource_limit`): 1,600 turns of a chat reach that with 32 layers. A gathered span has about ten arrays. The planes of
a layer are then views, and reading them copies nothing. A plane that is dropped in all layers is freed when the last
layer has dropped it. Large arrays are not gathered, because there cannot be many.
"""

from __future__ import annotations

from collections.abc import Iterator
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
class _LayerArray:
    """K or V of one segment of one layer."""

    layer: int
    number: int  # of the segment in its layer
    side: str  # "k" or "v"
    encoded: EncodedArray


def num_arrays(span: Span) -> int:
    """Count the arrays that MLX allocated for sealed tokens and for checkpoints. Rows of one array count once."""
    shared: set[tuple[object, str]] = set()
    count = sum(_count_arrays(state) for checkpoint in span.checkpoints.values() for state in checkpoint.states)
    for each in _encoded_arrays(span):
        if each.encoded.gathered is not None:
            shared.update((each.encoded.gathered, name) for name in each.encoded.arrays)
        else:
            count += len(each.encoded.arrays)
    return count + len(shared)


def has_to_gather(span: Span) -> bool:
    return not span.is_live and bool(_next_group(span))


def gather_some(span: Span) -> bool:
    """Gather the keys or the values of one group of layers. Return whether there was a group."""
    group = [] if span.is_live else _next_group(span)
    rows: list[dict[str, mx.array]] = [{} for _ in group]
    for name in group[0].encoded.arrays if group else ():
        stacked = mx.stack([each.encoded.arrays[name] for each in group])
        views = [row.squeeze(0) for row in mx.split(stacked, len(group))]
        mx.eval(views)
        for arrays, view in zip(rows, views, strict=True):
            arrays[name] = view
    shared = object()
    for each, arrays in zip(group, rows, strict=True):
        _put(span, each, replace(each.encoded, arrays=arrays, gathered=shared))
    return bool(group)


def _put(span: Span, each: _LayerArray, encoded: EncodedArray) -> None:
    segments = list(span.sealed(each.layer))
    segment = segments[each.number]
    segments[each.number] = SealedSegment(encoded, segment.v) if each.side == "k" else SealedSegment(segment.k, encoded)
    span.replace(each.layer, segments)


def _next_group(span: Span) -> list[_LayerArray]:
    """Return encoded arrays of several layers that are not gathered yet and can be; empty if there are none."""
    groups: dict[tuple[Any, ...], list[_LayerArray]] = {}
    for each in _encoded_arrays(span):
        encoded = each.encoded
        if encoded.gathered is None and max(array.nbytes for array in encoded.arrays.values()) < LARGE_BYTES:
            groups.setdefault(_group_key(each), []).append(each)
    return next((group for group in groups.values() if len(group) > 1), [])


def _encoded_arrays(span: Span) -> Iterator[_LayerArray]:
    for layer in span.layers:
        content = span.content(layer)
        for number, segment in enumerate(content.sealed if isinstance(content, OwnKV) else content):
            yield _LayerArray(layer, number, "k", segment.k)
            yield _LayerArray(layer, number, "v", segment.v)


def _group_key(each: _LayerArray) -> tuple[Any, ...]:
    encoded = each.encoded
    arrays = tuple((name, array.shape, array.dtype) for name, array in encoded.arrays.items())
    return each.number, each.side, encoded.codec, encoded.position, encoded.mean_runs, arrays


def _count_arrays(state: Any) -> int:
    if isinstance(state, SealedSegment):
        return len(state.arrays())
    return sum(array is not None for array in state.arrays) if isinstance(state, RecurrentState) else 0
