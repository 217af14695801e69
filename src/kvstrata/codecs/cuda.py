"""Attention on CUDA: one query for each head over planes and raw vectors, with kernels of our own.

Codes and vectors are read as they lie, a piece of up to 256 tokens to a warp, and what the pieces give is combined by
their largest score and their sum of exponentials: exact, in float32. Prefill decodes a layer into scratch instead
(`PlanesCodec.decode`). Knows planes and arrays; does not know sequences or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from kvstrata.codecs import cuda_kernels
from kvstrata.codecs.base import Planes
from kvstrata.codecs.cuda_codes import (
    FUSED_DIMS,
    THREADS,
    arrays_of,
    bits_of,
    piece_tokens,
    pieces_of,
    scalar,
    signs,
    tiles_for,
)
from kvstrata.codecs.cuda_kernels import WARPS, Kind

RAW_DTYPES = (mx.bfloat16, mx.float16)

# Parts that one launch takes. More kinds of launch would be more to compile.
PARTS_AT_ONCE = 3

_COMBINE_THREADS = 1024


@dataclass(frozen=True, eq=False)
class PlanesRange:
    """Tokens [start, end) of planes [kv_heads, tokens, dim]. Made once for many steps, it looks things up once."""

    k: Planes
    v: Planes
    start: int
    end: int

    @cached_property
    def fits(self) -> bool:
        return fits(self.k) and fits(self.v)

    @cached_property
    def arrays(self) -> list[mx.array]:
        return [*arrays_of(self.k), *arrays_of(self.v)]

    @cached_property
    def pieces(self) -> mx.array:
        size = piece_tokens(self.end - self.start, self.k.leading[0])
        return pieces_of(self.k.segments, self.v.segments, self.start, self.end, size)


@dataclass(frozen=True, eq=False)
class RawRange:
    """Vectors [1, kv_heads, tokens, dim]; a slice of a longer buffer is read where it lies."""

    k: mx.array
    v: mx.array

    @property
    def fits(self) -> bool:
        dims = (self.k.shape[-1], self.v.shape[-1])
        return self.k.dtype in RAW_DTYPES and self.k.dtype == self.v.dtype and all(dim in FUSED_DIMS for dim in dims)


class Partial(NamedTuple):
    """Attention over some of the tokens, as each block of a launch found it."""

    sums: mx.array  # float32 [kv_heads, blocks, queries, v_dim], not divided by the sum of exponentials
    stats: mx.array  # float32 [kv_heads, blocks, queries, 2]: largest score, sum of exponentials


@dataclass(frozen=True, eq=False)
class Slab:
    """What the running sequences of a layer write, a slot each. Kernels write it in place, unseen by MLX.

    So nothing else may be computed from it unless what `attend_step` returned has been evaluated before, and every row
    of a step has a slot of its own.
    """

    k: mx.array  # [slots, kv_heads, tokens, k_dim]
    v: mx.array  # [slots, kv_heads, tokens, v_dim]
    counters: mx.array  # uint32 [slots * kv_heads], 0 between launches

    @classmethod
    def allocate(cls, num_slots: int, num_tokens: int, k: mx.array, v: mx.array) -> Slab:
        """`k` and `v` [rows, kv_heads, tokens, dim] tell the rest of the shape."""
        heads = k.shape[1]
        slab = cls(
            mx.zeros((num_slots, heads, num_tokens, k.shape[3]), k.dtype),
            mx.zeros((num_slots, heads, num_tokens, v.shape[3]), v.dtype),
            mx.zeros((num_slots * heads,), mx.uint32),
        )
        mx.eval(slab.k, slab.v, slab.counters)
        return slab


class Attended(NamedTuple):
    out: mx.array  # [kv_heads, queries, v_dim]
    log_sum: mx.array  # float32 [kv_heads, queries]: log of the sum of the exponentials of all scores


def fits(planes: Planes) -> bool:
    """Whether the fused kernels read these planes; the others are decoded."""
    return "top" in planes.arrays and planes.dim in FUSED_DIMS and len(planes.leading) == 1


def attend(
    q: mx.array,  # [1, heads, 1, k_dim]
    ranges: Sequence[PlanesRange | RawRange],
    scale: float,
    sinks: mx.array | None = None,  # [heads]
) -> mx.array:
    """One query for each head over all ranges -> [1, heads, 1, v_dim]. All must fit, raw ones be of one dtype."""
    kv_heads = _num_heads(ranges[0])
    grouped = q.reshape(kv_heads, q.shape[1] // kv_heads, q.shape[3])
    launches = [ranges[i : i + PARTS_AT_ONCE] for i in range(0, len(ranges), PARTS_AT_ONCE)]
    partials = [partial(grouped, parts, scale) for parts in launches]
    return combine(partials, q.dtype, sinks).out.reshape(1, q.shape[1], 1, -1)


def step_fits(k: mx.array, v: mx.array, num_heads: int) -> bool:
    """Whether `attend_step` takes tokens k and v [rows, kv_heads, 1, dim] of a model with this many query heads."""
    group = num_heads // k.shape[1]
    return RawRange(k, v).fits and group <= 4 * tiles_for(group, max(k.shape[3], v.shape[3]))


def attend_step(
    q: mx.array,  # [rows, heads, 1, k_dim]
    k: mx.array,  # [rows, kv_heads, 1, k_dim], the new token of each row
    v: mx.array,
    slab: Slab,
    lengths: mx.array,  # int32 [rows]: tokens in the slot before this one
    slots: mx.array,  # int32 [rows]
    scale: float,
    shared: Sequence[PlanesRange | RawRange] = (),  # what all rows have before their slots
    sinks: mx.array | None = None,  # [heads]
) -> mx.array:
    """One launch: puts K and V into the slots and attends over all -> [rows, heads, 1, v_dim].

    Up to 8 queries for each of `kv_heads`; up to 4 beyond 128 dims. Shapes do not change from step to step, so the
    whole step of a model can be compiled.
    """
    rows, kv_heads, _, k_dim = k.shape
    group, v_dim = q.shape[1] // kv_heads, v.shape[3]
    calls = [_call(i, part, kv_heads) for i, part in enumerate(shared)]
    last, size = len(shared), piece_tokens(slab.k.shape[2], rows * kv_heads)
    num_blocks = sum(call.num_blocks for call in calls) + _num_blocks(slab.k.shape[2], size)
    tiles = tiles_for(group, max(k_dim, v_dim))
    out, _, _ = cuda_kernels.attend_step(tuple(call.kind for call in calls)).run(
        inputs=[
            *(k, v, lengths, slots, slab.counters, scalar(0.0) if sinks is None else sinks.astype(mx.float32)),
            *(q.reshape(rows * kv_heads, group, k_dim), scalar(scale), signs(k_dim), signs(v_dim)),
            *(x for call in calls for x in call.inputs),
            *(slab.k, slab.v),
        ],
        template=[
            *(("T", q.dtype), ("BF", slab.k.dtype == mx.bfloat16), ("K_DIM", k_dim), ("V_DIM", v_dim)),
            *(("TILES", tiles), ("HAS_SINKS", sinks is not None), (f"SIZE{last}", size)),
            *(number for call in calls for number in call.template),
        ],
        output_shapes=[
            (*q.shape[:3], v_dim),
            (rows * kv_heads, num_blocks, group, v_dim),
            (rows * kv_heads, num_blocks, group, 2),
        ],
        output_dtypes=[q.dtype, mx.float32, mx.float32],
        grid=(num_blocks * THREADS, rows * kv_heads, 1),
        threadgroup=(THREADS, 1, 1),
    )
    return out


def attend_planes(q: mx.array, k: Planes, v: Planes, start: int, end: int, scale: float = 1.0) -> Attended:
    """q [kv_heads, queries, k_dim] over tokens [start, end) -> float32"""
    return combine([partial(q, [PlanesRange(k, v, start, end)], scale)], mx.float32)


def partial(q: mx.array, parts: Sequence[PlanesRange | RawRange], scale: float) -> Partial:
    """q [kv_heads, queries, k_dim], in one launch"""
    heads, queries, k_dim = q.shape
    v_dim = _v_dim(parts[0])
    tiles = tiles_for(queries, max(k_dim, v_dim))
    calls = [_call(i, part, heads) for i, part in enumerate(parts)]
    num_blocks = sum(call.num_blocks for call in calls)
    sums, stats = cuda_kernels.attend(tuple(call.kind for call in calls)).run(
        inputs=[q, scalar(scale), signs(k_dim), signs(v_dim), *(x for call in calls for x in call.inputs)],
        template=[
            *(("T", q.dtype), ("BF", _is_bf16(parts)), ("K_DIM", k_dim), ("V_DIM", v_dim), ("TILES", tiles)),
            *(number for call in calls for number in call.template),
        ],
        output_shapes=[(heads, num_blocks, queries, v_dim), (heads, num_blocks, queries, 2)],
        output_dtypes=[mx.float32, mx.float32],
        grid=(num_blocks * THREADS, heads, -(-queries // (4 * tiles))),
        threadgroup=(THREADS, 1, 1),
    )
    return Partial(sums, stats)


def combine(partials: Sequence[Partial], dtype: mx.Dtype, sinks: mx.array | None = None) -> Attended:
    """A sink takes its share of the softmax and gives nothing."""
    heads, _, queries, v_dim = partials[0].sums.shape
    num_threads = _COMBINE_THREADS // v_dim * v_dim
    out, log_sum = cuda_kernels.combine(len(partials)).run(
        inputs=[scalar(0.0) if sinks is None else sinks.astype(mx.float32), *(x for pair in partials for x in pair)],
        template=[("T", dtype), ("V_DIM", v_dim), ("HAS_SINKS", sinks is not None)],
        grid=(heads * queries * num_threads, 1, 1),
        threadgroup=(num_threads, 1, 1),
        output_shapes=[(heads, queries, v_dim), (heads, queries)],
        output_dtypes=[dtype, mx.float32],
    )
    return Attended(out, log_sum)


class _Call(NamedTuple):
    """What a part adds to a launch."""

    kind: Kind
    inputs: list[mx.array]
    template: list[tuple[str, Any]]
    num_blocks: int


def _call(i: int, part: PlanesRange | RawRange, heads: int) -> _Call:
    if isinstance(part, RawRange):
        num_tokens = part.k.shape[2]
        size = piece_tokens(num_tokens, heads)
        return _Call("raw", [part.k, part.v], [(f"SIZE{i}", size)], _num_blocks(num_tokens, size))
    bits = [(f"K_BITS{i}", bits_of(part.k)), (f"V_BITS{i}", bits_of(part.v))]
    return _Call("planes", [part.pieces, *part.arrays], bits, -(-part.pieces.shape[0] // WARPS))


def _num_blocks(num_tokens: int, size: int) -> int:
    return -(-num_tokens // (size * WARPS))


def _is_bf16(parts: Sequence[PlanesRange | RawRange]) -> bool:
    return any(isinstance(part, RawRange) and part.k.dtype == mx.bfloat16 for part in parts)


def _num_heads(part: PlanesRange | RawRange) -> int:
    return part.k.shape[1] if isinstance(part, RawRange) else part.k.leading[0]


def _v_dim(part: PlanesRange | RawRange) -> int:
    return part.v.shape[3] if isinstance(part, RawRange) else part.v.dim
