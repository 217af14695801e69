"""Memory that is allocated once and written in place.

In place, as long as no reader holds a view of an earlier version: MLX would then copy the whole buffer. Views therefore
live for one forward pass only, and in each layer all writes of a step come before all reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.cuda_addresses import Whereabouts
from kvstrata.attention.parts import RawPart
from kvstrata.codecs.base import copy_rows

# On CUDA, MLX has its fast attention for buffers of a multiple of 256 tokens only.
TOKENS_STEP = 256 if mx.cuda.is_available() else 1
FEW_VALUES = 1 << 15


def round_up(num_tokens: int) -> int:
    """The size of a buffer for so many tokens."""
    return -(-num_tokens // TOKENS_STEP) * TOKENS_STEP


@contextmanager
def without_cache() -> Iterator[None]:
    """On a CPU MLX keeps what is freed for arrays of the same size. What replaces a layer is smaller: it would be put
    into memory that was never touched, and every page of that costs more than what is computed on it."""
    if mx.default_device() != mx.cpu:
        yield
        return
    limit_bytes = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(limit_bytes)


class KvShape(NamedTuple):
    """Of the keys and values of one token in one layer."""

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: mx.Dtype


class Buffer:
    """K and V of up to `size` tokens of one sequence in one layer. Allocated whole by the first write."""

    def __init__(self, size: int, shape: KvShape | None = None) -> None:
        """Without `shape` the first tokens that are put tell it, and only then can others write."""
        self.size = max(size, 2)  # see _assign
        self._shape = shape
        self.k: mx.array | None = None  # [1, kv_heads, size, k_dim]
        self.v: mx.array | None = None  # [1, kv_heads, size, v_dim]
        self.where = Whereabouts()  # on a GPU
        self._addresses: tuple[int, int] | None = None  # on a CPU

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def token_bytes(self) -> int:
        return self.nbytes // self.size

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.k, self.v) if array is not None]

    def part(self, num_tokens: int) -> RawPart:
        """The first so many tokens of what was written."""
        assert self.k is not None
        assert self.v is not None
        return RawPart(self.k, self.v, num_tokens, where=self.where)

    def put(self, at: int, k: mx.array, v: mx.array) -> None:  # [1, kv_heads, tokens, dim]
        if self.k is None or self.v is None:
            self.k, self.v = (mx.zeros((1, x.shape[1], self.size, x.shape[3]), x.dtype) for x in (k, v))
        _assign(self.k, at, k)
        _assign(self.v, at, v)
        self._addresses = None
        self.where.forget()

    def adopt(self, k: mx.array, v: mx.array) -> None:
        """Arrays of its size that no other code holds."""
        self.k, self.v, self._addresses = k, v, None
        self.where.forget()

    def addresses(self) -> tuple[int, int]:
        """Where K and V lie in memory, computed up to now. Good until the next `put`: nothing else moves a buffer."""
        if self._addresses is None:
            k, v = self.allocate()
            mx.eval(k, v)
            self._addresses = _address(k), _address(v)
        return self._addresses

    def allocate(self) -> tuple[mx.array, mx.array]:
        """K and V, for a kernel that writes to them: allocated if they are not."""
        if self.k is None or self.v is None:
            assert self._shape is not None, "no token was put yet, and its shape was not given"
            heads, k_dim, v_dim, dtype = self._shape
            self.k, self.v = (_zeros((1, heads, self.size, dim), dtype) for dim in (k_dim, v_dim))
        return self.k, self.v


def owned(array: mx.array) -> mx.array:
    """A copy that keeps no larger array alive, bit for bit."""
    flat = array.reshape(1, -1)
    return copy_rows(flat, 0, 1).reshape(array.shape)


def _assign(buffer: mx.array, at: int, tokens: mx.array) -> None:
    end = at + tokens.shape[2]
    if tokens.shape[2] < buffer.shape[2]:
        buffer[:, :, at:end] = tokens
        return
    # MLX takes a write of everything as a replacement: the buffer would become a view of what `tokens` is a slice of.
    half = end // 2
    buffer[:, :, :half] = tokens[:, :, :half]
    buffer[:, :, half:] = tokens[:, :, half:]


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """On a CPU few are copied: to compute them takes MLX 60 us, however few they are."""
    if dtype == mx.float32 and math.prod(shape) <= FEW_VALUES and mx.default_device() == mx.cpu:
        return mx.array(np.zeros(shape, np.float32))
    return mx.zeros(shape, dtype)


def _address(buffer: mx.array) -> int:
    view = np.asarray(buffer)
    assert view.dtype == np.float32, "kernels read and write nothing else"
    assert view.flags.c_contiguous, "kernels walk a buffer by its shape alone"
    return view.ctypes.data
