"""Planes on CUDA: encode, decode, scores and sums, with kernels of our own.

MLX has no quantized product on CUDA for the broadcast shapes of attention, and its others run at a few per cent of the
memory's bandwidth. Arrays have any leading axes. Attention itself is in `attention/cuda`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda.kernels import WARPS, Constant
from kvstrata.codecs.hadamard import sign_values
from kvstrata.codecs.mean_runs import GROUP_TOKENS, MeanRuns, runs_of
from kvstrata.codecs.rope import RopeRotation, tables

# A lane of a warp holds 16 dims of a key, so a head_dim is divided in units of 64.
FUSED_DIMS = (64, 128, 192, 256)

# For more queries (a prefill) decoding once is faster.
FUSED_QUERIES = 16

# A lane has 16 dims of a vector, and the lanes of a vector belong to one warp.
MAX_DIM = 512

THREADS = 32 * WARPS

_LONGEST_PIECE = GROUP_TOKENS  # tokens; a warp has memory for the mean's share of no more scores

_SHORTEST_PIECE = 64

_ENOUGH_WARPS = 1024  # to keep the GPU busy; with fewer, pieces are made shorter

_ENCODE_THREADS = 256  # as in encode.cuh

DECODE_THREADS = 256

RAW_BITS = 16  # marks raw vectors in tables

_TABLE_ROWS, _LOWER = 32, 2048  # as in rope_means.cuh and queries.cuh


def takes(dim: int) -> bool:
    """Whether the kernels encode and decode vectors of this size."""
    return dim <= MAX_DIM


def takes_queries(num_queries: int, dim: int) -> bool:
    """Whether scores and sums are computed faster from the codes than from decoded vectors."""
    return num_queries <= FUSED_QUERIES and dim in FUSED_DIMS


def rotation_of(encoded: EncodedArray) -> RopeRotation | None:
    return encoded.codec.rotation


def rotation_constants(rotation: RopeRotation | None, prefix: str = "", suffix: str = "") -> list[Constant]:
    """Constants of the RoPE rotation for kernels; without pairs there is no rotation."""
    numbers = (rotation.num_pairs, rotation.first, rotation.is_interleaved) if rotation else (0, 0, False)
    return [(f"{prefix}{name}{suffix}", n) for name, n in zip(("PAIRS", "FIRST", "INTERLEAVED"), numbers, strict=True)]


@lru_cache(maxsize=8)
def angles_of(rotation: RopeRotation | None) -> mx.array:
    """float32 [256, 2 * pairs]: cos, then sin"""
    if rotation is None:
        return mx.zeros((1,))
    cos, sin, _ = tables(rotation, rotation.end)
    return mx.array(np.concatenate([cos, sin], axis=1))


@lru_cache(maxsize=8)
def table_of(rotation: RopeRotation | None, dim: int) -> mx.array:
    """float32, then pairs of float16 as the bits of one float32: see rope_means.cuh"""
    if rotation is None:
        return mx.zeros((1,))
    cos, sin, columns = tables(rotation, dim)
    rotations = np.zeros((GROUP_TOKENS, 2, dim), np.float32)
    rotations[:, 0] = 1
    for dims in rotation.pairs():
        rotations[:, 0, dims], rotations[:, 1, dims] = cos, sin
    wide = columns.T[:_TABLE_ROWS]
    upper = wide.astype(np.float16)
    rows = np.stack([upper, ((wide - upper.astype(np.float32)) * _LOWER).astype(np.float16)])
    # Axes: upper or lower; of rows: half, block of 8, group; of dims: block of 32, quarter, product, pair, place.
    cut = rows.reshape(2, 2, 2, 8, dim // 32, 4, 2, 2, 2)
    # Axes: upper or lower, block of 32 dims, product, half; group and quarter of a lane; pair, block of 8 rows, place.
    rows = np.ascontiguousarray(cut.transpose(0, 4, 6, 1, 3, 5, 7, 2, 8))
    return mx.array(np.concatenate([rotations.ravel(), rows.view(np.float32).ravel()]))


def decode_planes(encoded: EncodedArray, dtype: mx.Dtype, start: int = 0, end: int | None = None) -> mx.array:
    """Tokens [start, end) -> [..., tokens, dim]"""
    rotation = rotation_of(encoded)
    count = (encoded.num_tokens if end is None else end) - start
    rows = encoded.num_values // (encoded.num_tokens * encoded.dim)
    num_units = rows * count * (encoded.dim // 16)
    (out,) = cuda_kernels.decode_planes().run(
        inputs=[
            *(signs(encoded.dim), angles_of(rotation)),
            starts_of(encoded.mean_runs, start, count, encoded.position % GROUP_TOKENS, bits_of(encoded)),
            *arrays_of(encoded),
        ],
        constants=(("T", dtype), ("DIM", encoded.dim), *rotation_constants(rotation)),
        grid=(-(-num_units // DECODE_THREADS) * DECODE_THREADS, 1, 1),
        threadgroup=(DECODE_THREADS, 1, 1),
        output_shapes=[(*encoded.leading, count, encoded.dim)],
        output_dtypes=[dtype],
    )
    return out


def encode_planes(x: mx.array, bits: int, position: int, rotation: RopeRotation | None) -> dict[str, mx.array]:
    """Encode [..., tokens, dim] to the planes of a code of `bits`, scales and means."""
    rows = x.reshape(-1, *x.shape[-2:])
    heads, num_tokens, dim = rows.shape
    mean_runs = runs_of(position, num_tokens)
    widths = {"top": dim // 16, "next": dim // 16 if bits >= 4 else 0, "low": dim // 8 if bits == 8 else 0}
    # An output that is not written still needs an entry.
    shapes = [(heads, num_tokens, width) if width else (1, 1, 1) for width in widths.values()]
    planes = cuda_kernels.encode_planes().run(
        inputs=[
            *(rows, signs(dim), angles_of(rotation)),
            starts_of(mean_runs, 0, num_tokens, position % GROUP_TOKENS, bits),
        ],
        constants=(("T", x.dtype), ("BITS", bits), ("DIM", dim), *rotation_constants(rotation)),
        output_shapes=[*shapes, (heads, num_tokens, 1), (heads, len(mean_runs), dim)],
        output_dtypes=[mx.uint32, mx.uint32, mx.uint32, mx.float16, mx.float16],
        grid=(len(mean_runs) * _ENCODE_THREADS, heads, 1),
        threadgroup=(_ENCODE_THREADS, 1, 1),
    )
    names = [*(name for name, width in widths.items() if width), "scales", "means"]
    held = [plane for plane, width in zip(planes, [*widths.values(), 1, 1], strict=True) if width]
    return {name: plane.reshape(*x.shape[:-2], *plane.shape[-2:]) for name, plane in zip(names, held, strict=True)}


def score_planes(q: mx.array, encoded: EncodedArray) -> mx.array:
    """q [..., queries, dim] -> float32 [..., queries, tokens]"""
    flat = q.reshape(-1, *q.shape[-2:])
    heads, queries, dim = flat.shape
    tiles, rotation = tiles_for(queries, dim), rotation_of(encoded)
    pieces = all_pieces(encoded, heads)
    (scores,) = cuda_kernels.score_planes().run(
        inputs=[flat, signs(dim), table_of(rotation, dim), pieces, *arrays_of(encoded)],
        constants=(
            *(("T", q.dtype), ("K_BITS", bits_of(encoded)), ("K_DIM", dim), ("TILES", tiles)),
            *rotation_constants(rotation, "K_"),
        ),
        output_shapes=[(heads, queries, encoded.num_tokens)],
        output_dtypes=[mx.float32],
        **_blocks(pieces.shape[0], heads, queries, tiles),
    )
    return scores.reshape(*q.shape[:-1], encoded.num_tokens)


def mix_planes(p: mx.array, encoded: EncodedArray) -> mx.array:
    """p [..., queries, tokens] -> float32 [..., queries, dim]"""
    flat = p.astype(mx.float32).reshape(-1, *p.shape[-2:])
    heads, queries, _ = flat.shape
    tiles = tiles_for(queries, encoded.dim)
    pieces = all_pieces(encoded, heads)
    (sums,) = cuda_kernels.mix_planes().run(
        inputs=[flat, signs(encoded.dim), pieces, *arrays_of(encoded)],
        constants=(
            ("V_BITS", bits_of(encoded)),
            ("V_DIM", encoded.dim),
            ("TILES", tiles),
        ),
        output_shapes=[(heads, pieces.shape[0], queries, encoded.dim)],
        output_dtypes=[mx.float32],
        **_blocks(pieces.shape[0], heads, queries, tiles),
    )
    return mx.sum(sums, axis=1).reshape(*p.shape[:-1], encoded.dim)


def _blocks(num_pieces: int, heads: int, queries: int, tiles: int) -> dict[str, Any]:
    return {
        "grid": (-(-num_pieces // WARPS) * THREADS, heads, -(-queries // (4 * tiles))),
        "threadgroup": (THREADS, 1, 1),
    }


def tiles_for(queries: int, dim: int) -> int:
    """Return the tiles of a block. Four queries fill a tile; two tiles read the planes once for eight queries. Beyond
    128 dims registers do not suffice for two."""
    return 2 if queries > 4 and dim <= 128 else 1


def blocks_for(tiles: int, dim: int) -> int:
    """Return the blocks that a multiprocessor should run at once. With more tiles or dims a block needs the registers
    of several."""
    return 3 if tiles == 1 and dim <= 128 else 1


def piece_tokens(num_tokens: int, heads: int) -> int:
    size = _LONGEST_PIECE
    while size > _SHORTEST_PIECE and num_tokens * heads < _ENOUGH_WARPS * size:
        size //= 2
    return size


def all_pieces(encoded: EncodedArray, heads: int) -> mx.array:
    size = piece_tokens(encoded.num_tokens, heads)
    offset = encoded.position % GROUP_TOKENS
    return pieces_of((encoded.mean_runs, encoded.mean_runs), offset, 0, encoded.num_tokens, size)


def bits_of(encoded: EncodedArray) -> int:
    if "values" in encoded.arrays:
        return RAW_BITS
    return 8 if "low" in encoded.arrays else 4 if "next" in encoded.arrays else 2


def arrays_of(encoded: EncodedArray) -> list[mx.array]:
    """Return the arrays that kernels take. The top plane stands in for a plane that is not held, and is not read."""
    held = encoded.arrays
    if "values" in held:
        return [held["values"]] * 5
    arrays = [held["top"], held.get("next", held["top"]), held.get("low", held["top"]), held["scales"], held["means"]]
    return arrays if len(encoded.leading) == 1 else [x.reshape(-1, *x.shape[-2:]) for x in arrays]


@lru_cache(maxsize=64)
def scalar(value: float) -> mx.array:
    return mx.array(value, mx.float32)


@lru_cache(maxsize=8)
def signs(dim: int) -> mx.array:
    return mx.array(sign_values(dim))


@lru_cache(maxsize=256)
def starts_of(mean_runs: MeanRuns, start: int, count: int, offset: int, bits: int) -> mx.array:
    return mx.array(np.array([start, count, offset, bits, *np.cumsum((0, *mean_runs))], np.int32))


@lru_cache(maxsize=256)
def pieces_of(mean_runs: tuple[MeanRuns, MeanRuns], offset: int, start: int, end: int, size: int) -> mx.array:
    return mx.array(piece_rows(mean_runs, offset, start, end, size))


@lru_cache(maxsize=256)
def piece_rows(mean_runs: tuple[MeanRuns, MeanRuns], offset: int, start: int, end: int, size: int) -> np.ndarray:
    """int32 [pieces, 5]: first token, number of tokens, mean run of keys, mean run of values, offset of the first token
    in its group. No piece crosses a mean run. `mean_runs` of keys and values; `offset` of token 0 in its group."""
    k_starts, v_starts = (np.cumsum((0, *each)) for each in mean_runs)
    bounds = np.unique(np.clip(np.concatenate([k_starts, v_starts, [start, end]]), start, end))
    runs = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    firsts = np.array([(first, min(size, b - first)) for a, b in runs for first in range(a, b, size)], np.int32)
    numbers = [np.searchsorted(starts, firsts[:, 0], side="right") - 1 for starts in (k_starts, v_starts)]
    return np.column_stack([firsts, *numbers, (offset + firsts[:, 0]) % GROUP_TOKENS]).astype(np.int32)
