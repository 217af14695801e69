"""Join keys and values of a layer to plain arrays on CUDA, for a chunk: a launch for K and one for V.

The kernel finds cached KV through addresses, as in a decode step. The result depends on the arrays behind the
addresses, so MLX keeps these arrays until the launches have ended. The tokens that the sequence has just written are an
argument. Knows ranges; does not know segments, sequences or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.cuda.ranges import RAW_DTYPES, EncodedRange, Range, RawRange, is_raw
from kvstrata.attention.cuda.step import addresses_of, held_by
from kvstrata.attention.cuda.tables import segment_table_length, table_length
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda import addresses as cuda_addresses
from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda.kernels import ENTRY
from kvstrata.codecs.cuda.planes import (
    DECODE_THREADS,
    RAW_BITS,
    angles_of,
    bits_of,
    rotation_constants,
    rotation_of,
    signs,
)
from kvstrata.codecs.mean_runs import GROUP_TOKENS, MeanRuns
from kvstrata.codecs.rope import RopeRotation

_OWN_BITS = 0

_VALUES_PLACE = 5  # index of values in a row of addresses

_FEWEST_SPANS, _FEWEST_STARTS = 64, 512  # entries of a table, so that shapes seldom change


class JoinInput(NamedTuple):
    """Inputs of a join: ranges of cached KV, then tokens of the sequence's own buffer, if there are any."""

    ranges: Sequence[Range]
    own: RawRange | None
    rotation: RopeRotation | None  # RoPE rotation of keys


class JoinedRange(NamedTuple):
    """Keys or values of one range."""

    bits: int
    num_tokens: int  # of the arrays
    start: int
    end: int
    mean_runs: MeanRuns = ()
    offset: int = 0  # of token 0 in the group that shares a mean


class JoinTables(NamedTuple):
    ranges: mx.array  # int32 [1 + ranges, 8], see decode.cuh
    starts: mx.array  # int32: the start of each mean run of each range, and the end of its last mean run
    total: int  # tokens


def join_input(ranges: Sequence[Range], own: RawRange | None, dtype: mx.Dtype) -> JoinInput | None:
    """Return the inputs of a join. None: the kernel does not take them, or there is nothing to join."""
    joined = ranges if own is None else [*ranges, own]
    planes = [kv for kv in ranges if isinstance(kv, EncodedRange)]
    rotations = {rotation_of(kv.k) for kv in planes if not is_raw(kv.k)} or {None}
    fits = dtype in RAW_DTYPES and all(kv.fits and kv.raw_dtypes <= {dtype} for kv in joined)
    if not planes or len(joined) < 2 or len(rotations) > 1 or not fits:
        return None
    return JoinInput(ranges, own, *rotations)


def join(inputs: JoinInput, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return K and V, [1, kv_heads, tokens, dim]."""
    ranges, own, rotation = inputs
    addresses = cuda_addresses.collect([addresses_of(kv) for kv in ranges], segment_table_length(len(ranges)))
    planes = next(kv for kv in ranges if isinstance(kv, EncodedRange))
    (heads,) = planes.k.leading
    own_k, own_v = (own.k, own.v) if own else (_nothing(heads, x.dim, dtype) for x in (planes.k, planes.v))
    k_spans, v_spans = [_span(kv, kv.k) for kv in ranges], [_span(kv, kv.v) for kv in ranges]
    if own is not None:
        k_spans.append(JoinedRange(_OWN_BITS, own.k.shape[2], own.start, own.end))
        v_spans.append(k_spans[-1])
    k = _decoded(_tables(tuple(k_spans)), addresses, own_k, rotation, place=0)
    v = _decoded(_tables(tuple(v_spans)), addresses, own_v, None, place=_VALUES_PLACE)
    k, v = mx.depends([k, v], held_by([ranges], []))
    return k, v


def _span(kv: Range, held: EncodedArray | mx.array) -> JoinedRange:
    if isinstance(held, mx.array):
        return JoinedRange(RAW_BITS, held.shape[2], kv.start, kv.end)
    offset = held.position % GROUP_TOKENS
    return JoinedRange(bits_of(held), held.num_tokens, kv.start, kv.end, held.mean_runs, offset)


@lru_cache(maxsize=256)
def _tables(spans: tuple[JoinedRange, ...]) -> JoinTables:
    """Make the tables of spans. Layers that are stored alike share them."""
    rows = np.zeros((table_length(1 + len(spans), _FEWEST_SPANS), ENTRY), np.int32)
    starts: list[int] = []
    total = 0
    for number, span in enumerate(spans):
        is_coded = span.bits not in (RAW_BITS, _OWN_BITS)
        numbers = (total, span.start, span.num_tokens, span.bits, len(span.mean_runs), len(starts), span.offset)
        rows[1 + number] = (*numbers, number if span.bits != _OWN_BITS else 0)
        starts += np.cumsum((0, *span.mean_runs)).tolist() if is_coded else []
        total += span.end - span.start
    rows[0, :2] = total, len(spans)
    padding = table_length(len(starts), _FEWEST_STARTS) - len(starts)
    return JoinTables(mx.array(rows), mx.array(np.array([*starts, *[0] * padding], np.int32)), total)


def _decoded(
    tables: JoinTables, addresses: mx.array, own: mx.array, rotation: RopeRotation | None, *, place: int
) -> mx.array:
    (_, heads, _, dim), dtype = own.shape, own.dtype
    num_units = heads * tables.total * (dim // 16)
    (out,) = cuda_kernels.decode_ranges().run(
        (("T", dtype), ("DIM", dim), ("PLACE", place), *rotation_constants(rotation)),
        inputs=[signs(dim), angles_of(rotation), tables.ranges, tables.starts, addresses, own],
        output_shapes=[(1, heads, tables.total, dim)],
        output_dtypes=[dtype],
        grid=(-(-num_units // DECODE_THREADS) * DECODE_THREADS, 1, 1),
        threadgroup=(DECODE_THREADS, 1, 1),
    )
    return out


@lru_cache(maxsize=8)
def _nothing(heads: int, dim: int, dtype: mx.Dtype) -> mx.array:
    return mx.zeros((1, heads, 1, dim), dtype)
