"""Vectors to planes by the kernels that are written once for Metal, CUDA and tests. The way back: portable_decode.py.

Two launches: the means of all segments, then the codes. Leading axes are any. Whether a machine uses the kernels is not
known here.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from kvstrata.codecs import kernel_text
from kvstrata.codecs.cuda_codes import pieces_of
from kvstrata.codecs.kernel_text import LARGEST_DIM, RAW_KINDS, Dialect, Launch, Run
from kvstrata.codecs.rotation import sign_values
from kvstrata.codecs.segments import GROUP_TOKENS, Segments, segments_of
from kvstrata.codecs.turns import Turn, tables

PIECE_TOKENS = 32  # of a group
# MLX passes arrays of fewer entries to Metal in another kind of memory, for which the kernels are not written.
FEWEST_ENTRIES = 8
HEAD_NUMBERS = 16  # of a table, before its pieces


def takes(x: mx.array) -> bool:
    """Whether vectors [..., tokens, dim] are encoded."""
    return takes_vectors(x.dtype, x.shape[-1]) and x.size // x.shape[-1] >= FEWEST_ENTRIES


def takes_vectors(dtype: mx.Dtype, dim: int) -> bool:
    return dtype in RAW_KINDS and dim % 16 == 0 and dim <= LARGEST_DIM


def encode(
    x: mx.array, bits: int, position: int, turn: Turn | None, dialect: Dialect, run: Run = kernel_text.run_on_gpu
) -> dict[str, mx.array]:
    """[..., tokens, dim] -> the planes that a code of `bits` has, scales and means"""
    rows = x.reshape(-1, *x.shape[-2:])
    heads, num_tokens, dim = rows.shape
    segments = segments_of(position, num_tokens)
    offset = position % GROUP_TOKENS
    angles = angles_of(turn, dim)
    whole, pieces = (_piece_table(segments, offset, turn, size) for size in (GROUP_TOKENS, PIECE_TOKENS))
    shape = (heads, len(segments), dim)
    text = kernel_text.mean_text(dialect, dim)
    (means,) = run(Launch(text, [whole, angles, rows], (len(segments), heads, 1), [shape], [mx.float16]))
    text = kernel_text.encode_text(dialect, dim, bits)
    widths = {"top": dim // 16, "next": dim // 16, "low": dim // 8, "scales": 1}
    shapes = [(heads, num_tokens, widths[name]) for name in text.outputs]
    dtypes = [mx.float16 if name == "scales" else mx.uint32 for name in text.outputs]
    groups = (_num_pieces(pieces), heads, 1)
    made = run(Launch(text, [pieces, angles, rows, means], groups, shapes, dtypes))
    planes = {**dict(zip(text.outputs, made, strict=True)), "means": means}
    return {name: plane.reshape(*x.shape[:-2], *plane.shape[-2:]) for name, plane in planes.items()}


def _num_pieces(table: mx.array) -> int:
    return (table.size - HEAD_NUMBERS) // 5


@lru_cache(maxsize=64)
def _piece_table(segments: Segments, offset: int, turn: Turn | None, size: int) -> mx.array:
    """int32, as planes.h reads it"""
    head = head_numbers(turn)
    head[4:6] = sum(segments), len(segments)
    pieces = np.asarray(pieces_of((segments, segments), offset, 0, sum(segments), size))
    return mx.array(np.concatenate([head, pieces.ravel()]))


def head_numbers(turn: Turn | None) -> np.ndarray:
    """int32 [16]: the first four tell how keys turn, the last eight the signs of the rotation."""
    numbers = np.zeros(HEAD_NUMBERS, np.int32)
    if turn is not None:
        numbers[:4] = (turn.first, *turn.strides, turn.num_pairs)
    negative = np.packbits(sign_values(LARGEST_DIM) < 0, bitorder="little")
    numbers[8:] = negative.view(np.int32)
    return numbers


@lru_cache(maxsize=8)
def angles_of(turn: Turn | None, dim: int) -> mx.array:
    """float32 [256, dim / 16, 16]: for each of the lanes that share a vector 8 cosines and 8 sines"""
    if turn is None:
        return mx.array(np.zeros(FEWEST_ENTRIES, np.float32))
    found = tables(turn, dim)
    both = np.zeros((2, GROUP_TOKENS, dim // 2), np.float32)
    both[0, :, : turn.num_pairs], both[1, :, : turn.num_pairs] = found.cos, found.sin
    return mx.array(both.reshape(2, GROUP_TOKENS, dim // 16, 8).transpose(1, 2, 0, 3).copy())
