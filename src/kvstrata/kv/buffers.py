"""KV buffers: preallocated K and V, written in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.segments import KernelViews, KvSlot, RawSegment
from kvstrata.codecs.base import copy_rows

# On CUDA, MLX has its fast attention for buffers of a multiple of 256 tokens only.
TOKENS_STEP = 256 if mx.cuda.is_available() else 1

FEW_VALUES = 1 << 15


def round_up(num_tokens: int) -> int:
    """Return the size of a buffer for `num_tokens` tokens."""
    return -(-num_tokens // TOKENS_STEP) * TOKENS_STEP


@contextmanager
def without_cache() -> Iterator[None]:
    """Run without MLX's buffer cache, which on a CPU keeps freed memory for arrays of the same size. The replacement of
    a layer is smaller: it would be put into untouched memory, where a page costs more than the computation on it."""
    if mx.default_device() != mx.cpu:
        yield
        return
    limit_bytes = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(limit_bytes)


class KvShape(NamedTuple):
    """Shape and dtype of the keys and values of one token in one layer."""

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: mx.Dtype


class KvBuffer:
    """K and V of up to `size` tokens of one sequence in one layer. The first write allocates all of it."""

    def __init__(self, size: int, shape: KvShape | None = None) -> None:
        """`shape`: None where the first `put` determines it; kernels can write only after that."""
        self.size = max(size, 2)  # see _assign
        self._shape = shape
        self.k: mx.array | None = None  # [1, kv_heads, size, k_dim]
        self.v: mx.array | None = None  # [1, kv_heads, size, v_dim]
        self.views = KernelViews()  # of K and V; nothing but `put` and `adopt` moves a buffer
        self.used = 0  # tokens counted by a list of buffers; a ring counts its own

    @property
    def free(self) -> int:
        return self.size - self.used

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def token_bytes(self) -> int:
        return self.nbytes // self.size

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.k, self.v) if array is not None]

    def segment(self, num_tokens: int) -> RawSegment:
        """Return the first `num_tokens` of the written tokens."""
        assert self.k is not None
        assert self.v is not None
        return RawSegment(self.k, self.v, num_tokens, views=self.views)

    def put(self, at: int, k: mx.array, v: mx.array) -> None:  # [1, kv_heads, tokens, dim]
        if self.k is None or self.v is None:
            self.k, self.v = (mx.zeros((1, x.shape[1], self.size, x.shape[3]), x.dtype) for x in (k, v))
        _assign(self.k, at, k)
        _assign(self.v, at, v)
        self.views.forget()

    def adopt(self, k: mx.array, v: mx.array) -> None:
        """Take over arrays of the buffer's size that no other code holds."""
        self.k, self.v = k, v
        self.views.forget()

    def allocate(self) -> tuple[mx.array, mx.array]:
        """Return K and V for a kernel that writes to them. Allocate them if they are not allocated yet."""
        if self.k is None or self.v is None:
            assert self._shape is not None, "no token was put yet, and its shape was not given"
            heads, k_dim, v_dim, dtype = self._shape
            self.k, self.v = (_zeros((1, heads, self.size, dim), dtype) for dim in (k_dim, v_dim))
        return self.k, self.v

    def slot(self, at: int, num_tokens: int) -> KvSlot:
        """Return the slot of a token that a kernel writes, `num_tokens` being in the buffer with it."""
        return KvSlot(*self.allocate(), self.size, at, num_tokens, self.views)


def owned(array: mx.array) -> mx.array:
    """Return a copy, bit for bit, that keeps no larger array alive."""
    flat = array.reshape(1, -1)
    return copy_rows(flat, 0, 1).reshape(array.shape)


def _assign(buffer: mx.array, at: int, tokens: mx.array) -> None:
    end = at + tokens.shape[2]
    if tokens.shape[2] < buffer.shape[2]:
        buffer[:, :, at:end] = tokens
        return
    # MLX treats a write of all slots as a replacement: the buffer would become a view of the array behind `tokens`.
    half = end // 2
    buffer[:, :, :half] = tokens[:, :, :half]
    buffer[:, :, half:] = tokens[:, :, half:]


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return zeros. On a CPU few are copied from numpy: computing them takes MLX 60 us, however few they are."""
    if dtype == mx.float32 and math.prod(shape) <= FEW_VALUES and mx.default_device() == mx.cpu:
        return mx.array(np.zeros(shape, np.float32))
    return mx.zeros(shape, dtype)


# Free slots beside the newest tokens after the others were encoded, and least size of a buffer that is added later:
# the next seal moves the newest tokens again, with all their free slots.
FREE_TOKENS = 512


class KvBufferList:
    """Buffers of one layer of a sequence, which fill up in order, and a promise of more."""

    def __init__(self, capacity: int, raw_tokens: int | None, shape: KvShape | None) -> None:
        """`capacity`: tokens that may be written. `raw_tokens`: most of them that have buffers at once; None: all."""
        self._raw_tokens = raw_tokens
        self._shape = shape
        first = capacity if raw_tokens is None else min(capacity, raw_tokens)
        self._buffers = [self._new_buffer(first)]
        self._unallocated = capacity - first  # tokens without a buffer yet
        self.version = 0  # changes with the buffers, and with each write by MLX

    def _new_buffer(self, num_tokens: int) -> KvBuffer:
        return KvBuffer(round_up(num_tokens), self._shape)

    @property
    def capacity(self) -> int:
        """Tokens that fit, including tokens without a buffer yet."""
        return sum(buffer.size for buffer in self._buffers) + self._unallocated

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def token_bytes(self) -> int:
        return self._buffers[0].token_bytes

    @property
    def num_tokens(self) -> int:
        return sum(buffer.used for buffer in self._buffers)

    def arrays(self) -> list[mx.array]:
        return [array for buffer in self._buffers for array in buffer.arrays()]

    def segments(self) -> list[RawSegment]:
        return [buffer.segment(buffer.used) for buffer in self._buffers if buffer.used]

    def grow(self, tokens: int) -> None:
        if self._raw_tokens is None and not self._unallocated:
            self._buffers.append(self._new_buffer(tokens))
            self.version += 1
        else:
            self._unallocated += tokens

    def reserve(self, num_tokens: int) -> None:
        """Add a buffer if `num_tokens` more do not fit, out of the unallocated tokens. Buffers stay few at any
        length."""
        if self._buffers[-1].free >= num_tokens:
            return  # the usual case, kept fast: a plan of a step asks this of each layer of each row
        free = sum(buffer.free for buffer in self._buffers)
        if free < num_tokens and self._unallocated:
            size = max(num_tokens - free, self._raw_tokens or max(FREE_TOKENS, self.capacity // 4))
            self._buffers.append(self._new_buffer(min(size, self._unallocated)))
            self._unallocated = max(0, self._unallocated - self._buffers[-1].size)
            self.version += 1

    def append(self, k: mx.array, v: mx.array) -> int:
        """Write tokens [1, kv_heads, tokens, dim] until the buffers are full. Return how many were written."""
        start, total = 0, k.shape[2]
        self.reserve(total)
        self.version += 1
        for buffer in self._buffers:
            count = min(buffer.free, total - start)
            if count:
                buffer.put(buffer.used, k[:, :, start : start + count], v[:, :, start : start + count])
                buffer.used += count
                start += count
        return start

    def next_slot(self) -> KvSlot | None:
        """Return the slot for one more token, which is not counted yet: see `count_next`. None: no slot is free."""
        self.reserve(1)
        buffer = self.next_buffer
        return buffer.slot(buffer.used, buffer.used + 1) if buffer.free else None

    @property
    def next_buffer(self) -> KvBuffer:
        """The buffer that has `next_slot`."""
        return self._buffers[self.num_full]

    def count_next(self) -> None:
        """Count the token in `next_slot`: the caller writes it there, or has written it by `put_last`."""
        self.next_buffer.used += 1

    def put_last(self, k: mx.array, v: mx.array) -> None:
        self.version += 1
        buffer = next(buffer for buffer in reversed(self._buffers) if buffer.used)
        buffer.put(buffer.used - 1, k, v)

    @property
    def num_full(self) -> int:
        """Number of buffers before the one that the next token goes to. Buffers fill up in order."""
        if len(self._buffers) == 1:
            return 0
        return next((i for i, buffer in enumerate(self._buffers) if buffer.free), len(self._buffers) - 1)

    def full_segments(self) -> list[RawSegment]:
        return [buffer.segment(buffer.used) for buffer in self._buffers[: self.num_full]]

    def whole_arrays(self) -> tuple[mx.array, mx.array] | None:
        """Return K and V if they fill one buffer exactly: it can be kept as it is, if it is not written again."""
        buffer = self._buffers[0]
        if len(self._buffers) > 1 or buffer.free or buffer.k is None or buffer.v is None:
            return None
        return buffer.k.squeeze(0), buffer.v.squeeze(0)  # an index would copy

    def size_for(self, num_recent: int) -> int:
        """Return the size of the buffer that the newest tokens move to when all others are encoded."""
        free = self.capacity - self.num_tokens
        most = FREE_TOKENS if self._raw_tokens is None else max(0, self._raw_tokens - num_recent)
        return round_up(num_recent + min(free, most))

    def keep_only(self, recent: Sequence[mx.array], num_recent: int) -> None:
        """Drop all buffers for one with `recent`: K and V of `size_for` tokens, or empty where no token stays."""
        free = self.capacity - self.num_tokens
        newest = KvBuffer(self.size_for(num_recent), self._shape)
        newest.used = num_recent
        if recent:
            newest.adopt(*recent)
        self._buffers = [newest]
        self._unallocated = max(0, free - newest.free)
        self.version += 1
