"""A fixed orthogonal rotation that spreads outlier channels over all others: random signs, then a Hadamard matrix.

The signs are part of the stored format: they never change within a version. Where `dim` is no power of two, the matrix
is block-diagonal, with blocks of the largest power of two that divides `dim` (a sliced matrix is not orthogonal).
"""

from __future__ import annotations

import hashlib
from functools import cache

import mlx.core as mx
import numpy as np

from kvstrata.codecs.base import UnsupportedCodec

# Smaller blocks would not spread an outlier; the kernels work on four values at a time.
SMALLEST_BLOCK = 16


def block_of(dim: int) -> int:
    """Return the largest power of two that divides dim."""
    return dim & -dim


def check_dim(name: str, dim: int) -> None:
    if dim < 1 or block_of(dim) < SMALLEST_BLOCK:
        raise UnsupportedCodec(f"{name} needs a head_dim that {SMALLEST_BLOCK} divides, not {dim}. Use raw.")


@cache
def sign_values(dim: int) -> np.ndarray:
    """float32 [dim] of +1 and -1; the signs of a smaller dim are the first signs of a larger one."""
    bits = np.unpackbits(np.frombuffer(hashlib.shake_128(b"kvstrata rotation 1").digest(dim // 8 + 1), np.uint8))
    signs = 1.0 - 2.0 * bits[:dim].astype(np.float32)
    signs.flags.writeable = False
    return signs


def rotate(x: mx.array) -> mx.array:
    """float32 [..., dim]"""
    return _transform(x * mx.array(sign_values(x.shape[-1])))


def rotate_back(y: mx.array) -> mx.array:
    return _transform(y) * mx.array(sign_values(y.shape[-1]))


def _transform(x: mx.array) -> mx.array:
    block = block_of(x.shape[-1])
    return mx.hadamard_transform(x.reshape(*x.shape[:-1], -1, block)).reshape(x.shape)
