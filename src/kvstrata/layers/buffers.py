"""Memory that is allocated once and written in place.

In place, as long as no reader holds a view of an earlier version: MLX would then copy the whole buffer. Views therefore
live for one forward pass only, and in each layer all writes of a step come before all reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from kvstrata.attention.cpu import Tokens
from kvstrata.attention.cuda_addresses import Whereabouts
from kvstrata.attention.parts import RawPart
from kvstrata.codecs.base import copy_rows

CUDA_TOKENS = 256
FEW_VALUES = 1 << 15


def round_up(num_tokens: int) -> int:
    """The size of a buffer for so many tokens. On CUDA, MLX has its fast attention for multiples of 256 only."""
    return -(-num_tokens // CUDA_TOKENS) * CUDA_TOKENS if mx.cuda.is_available() else num_tokens


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


class Buffer:
    """K and V of up to `size` tokens of one sequence in one layer. Allocated whole by the first write."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 2)  # see _assign
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
        k_buffer, v_buffer = self.allocate(k, v)
        _assign(k_buffer, at, k)
        _assign(v_buffer, at, v)
        self._addresses = None
        self.where.forget()

    def adopt(self, k: mx.array, v: mx.array) -> None:
        """Arrays of its size that no other code holds."""
        self.k, self.v, self._addresses = k, v, None
        self.where.forget()

    def addresses(self, k: Tokens, v: Tokens) -> tuple[int, int]:
        """Where K and V lie in memory, computed up to now. `k` and `v` are new tokens: they tell the shape if need be.

        Good until the next `put`: nothing else moves a buffer.
        """
        if self._addresses is None:
            if self.k is None or self.v is None:
                self.k, self.v = _zeros(self._shape(k)), _zeros(self._shape(v))
            mx.eval(self.k, self.v)
            self._addresses = _address(self.k), _address(self.v)
        return self._addresses

    def allocate(self, k: mx.array | None, v: mx.array | None) -> tuple[mx.array, mx.array]:
        """K and V, allocated if they are not: `k` and `v` are new tokens and tell the shape."""
        if self.k is None or self.v is None:
            assert k is not None
            assert v is not None
            self.k, self.v = mx.zeros(self._shape(k), k.dtype), mx.zeros(self._shape(v), v.dtype)
        return self.k, self.v

    def _shape(self, tokens: Tokens) -> tuple[int, ...]:
        return 1, tokens.shape[1], self.size, tokens.shape[3]


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


def _zeros(shape: tuple[int, ...]) -> mx.array:
    """For kernels on a CPU, in float32. Few are copied: to compute them takes MLX 60 us, however few they are."""
    if math.prod(shape) <= FEW_VALUES:
        return mx.array(np.zeros(shape, np.float32))
    return mx.zeros(shape, mx.float32)


def _address(buffer: mx.array) -> int:
    view = np.asarray(buffer)
    assert view.flags.c_contiguous, "kernels walk a buffer by its shape alone"
    return view.ctypes.data
