"""KV buffers: preallocated K and V, written in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda.step import KvSlot
from kvstrata.attention.segments import RawSegment
from kvstrata.codecs.base import copy_rows
from kvstrata.codecs.cuda.addresses import KernelViews

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
        self.gpu_addresses = KernelViews()  # addresses on a GPU
        self._addresses: tuple[int, int] | None = None  # of K and V, on a CPU

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
        return RawSegment(self.k, self.v, num_tokens, addresses=self.gpu_addresses)

    def put(self, at: int, k: mx.array, v: mx.array) -> None:  # [1, kv_heads, tokens, dim]
        if self.k is None or self.v is None:
            self.k, self.v = (mx.zeros((1, x.shape[1], self.size, x.shape[3]), x.dtype) for x in (k, v))
        _assign(self.k, at, k)
        _assign(self.v, at, v)
        self._addresses = None
        self.gpu_addresses.forget()

    def adopt(self, k: mx.array, v: mx.array) -> None:
        """Take over arrays of the buffer's size that no other code holds."""
        self.k, self.v, self._addresses = k, v, None
        self.gpu_addresses.forget()

    def addresses(self) -> tuple[int, int]:
        """Evaluate K and V, and return their addresses: valid until the next `put`; nothing else moves a buffer."""
        if self._addresses is None:
            k, v = self.allocate()
            mx.eval(k, v)
            self._addresses = _address(k), _address(v)
        return self._addresses

    def allocate(self) -> tuple[mx.array, mx.array]:
        """Return K and V for a kernel that writes to them. Allocate them if they are not allocated yet."""
        if self.k is None or self.v is None:
            assert self._shape is not None, "no token was put yet, and its shape was not given"
            heads, k_dim, v_dim, dtype = self._shape
            self.k, self.v = (_zeros((1, heads, self.size, dim), dtype) for dim in (k_dim, v_dim))
        return self.k, self.v


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


def _address(buffer: mx.array) -> int:
    view = np.asarray(buffer)
    assert view.dtype == np.float32, "kernels read and write nothing else"
    assert view.flags.c_contiguous, "kernels walk a buffer by its shape alone"
    return view.ctypes.data


# Free slots beside the newest tokens after the others were encoded, and least size of a buffer that is added later:
# the next seal moves the newest tokens again, with all their free slots.
FREE_TOKENS = 512


@dataclass
class Piece:
    buffer: KvBuffer
    used: int = 0

    @property
    def free(self) -> int:
        return self.buffer.size - self.used


class KvBufferList:
    def __init__(self, capacity: int, raw_tokens: int | None, shape: KvShape | None) -> None:
        """`capacity`: tokens that may be written. `raw_tokens`: most of them that have buffers at once; None: all."""
        self._raw_tokens = raw_tokens
        self._shape = shape
        first = capacity if raw_tokens is None else min(capacity, raw_tokens)
        self._buffers = [_piece(first, shape)]
        self._unallocated = capacity - first  # tokens without a buffer yet
        self.version = 0  # changes with the buffers, and with each write by MLX

    @property
    def capacity(self) -> int:
        """Tokens that fit, including tokens without a buffer yet."""
        return sum(piece.buffer.size for piece in self._buffers) + self._unallocated

    @property
    def nbytes(self) -> int:
        return sum(piece.buffer.nbytes for piece in self._buffers)

    @property
    def token_bytes(self) -> int:
        return self._buffers[0].buffer.token_bytes

    @property
    def num_tokens(self) -> int:
        return sum(piece.used for piece in self._buffers)

    def arrays(self) -> list[mx.array]:
        return [array for piece in self._buffers for array in piece.buffer.arrays()]

    def segments(self) -> list[RawSegment]:
        return [piece.buffer.segment(piece.used) for piece in self._buffers if piece.used]

    def grow(self, tokens: int) -> None:
        if self._raw_tokens is None and not self._unallocated:
            self._buffers.append(_piece(tokens, self._shape))
            self.version += 1
        else:
            self._unallocated += tokens

    def reserve(self, num_tokens: int) -> None:
        """Add a buffer if `num_tokens` more do not fit, out of the promised tokens. Buffers stay few at any length."""
        if self._buffers[-1].free >= num_tokens:
            return  # the usual case, kept fast: a plan of a step asks this of each layer of each row
        free = sum(piece.free for piece in self._buffers)
        if free < num_tokens and self._unallocated:
            size = max(num_tokens - free, self._raw_tokens or max(FREE_TOKENS, self.capacity // 4))
            self._buffers.append(_piece(min(size, self._unallocated), self._shape))
            self._unallocated = max(0, self._unallocated - self._buffers[-1].buffer.size)
            self.version += 1

    def append(self, k: mx.array, v: mx.array) -> int:
        """Write tokens [1, kv_heads, tokens, dim] until the buffers are full. Return how many were written."""
        start, total = 0, k.shape[2]
        self.reserve(total)
        self.version += 1
        for piece in self._buffers:
            count = min(piece.free, total - start)
            if count:
                piece.buffer.put(piece.used, k[:, :, start : start + count], v[:, :, start : start + count])
                piece.used += count
                start += count
        return start

    def runs_with_next(self) -> tuple[list[cpu_step.TokenRun], bool]:
        """Return all tokens with a slot for one more, which the caller writes there; and whether a slot was free."""
        self.reserve(1)
        runs, is_placed = [], False
        for piece in self._buffers:
            at = cpu_step.NOWHERE if is_placed or not piece.free else piece.used
            if at != cpu_step.NOWHERE:
                piece.used += 1
                is_placed = True
            if piece.used:
                runs.append(cpu_step.TokenRun(*piece.buffer.addresses(), piece.buffer.size, at, piece.used))
        return runs, is_placed

    def next_slot(self) -> KvSlot | None:
        """Return the slot for one more token, which is not counted yet: see `count_next`. None: no slot is free."""
        self.reserve(1)
        piece = self.next_buffer
        if not piece.free:
            return None
        buffer = piece.buffer
        return KvSlot(*buffer.allocate(), buffer.size, piece.used, piece.used + 1, buffer.gpu_addresses)

    @property
    def next_buffer(self) -> Piece:
        """The buffer that has `next_slot`."""
        return self._buffers[self.num_full]

    def count_next(self) -> None:
        """Count the token in `next_slot`: the caller writes it there, or has written it by `put_last`."""
        self.next_buffer.used += 1

    def put_last(self, k: mx.array, v: mx.array) -> None:
        self.version += 1
        piece = next(piece for piece in reversed(self._buffers) if piece.used)
        piece.buffer.put(piece.used - 1, k, v)

    @property
    def num_full(self) -> int:
        """Number of buffers before the one that the next token goes to. Buffers fill up in order."""
        if len(self._buffers) == 1:
            return 0
        return next((i for i, piece in enumerate(self._buffers) if piece.free), len(self._buffers) - 1)

    def full_segments(self) -> list[RawSegment]:
        return [piece.buffer.segment(piece.used) for piece in self._buffers[: self.num_full]]

    def whole_arrays(self) -> tuple[mx.array, mx.array] | None:
        """Return K and V if they fill one buffer exactly: it can be kept as it is, if it is not written again."""
        piece = self._buffers[0]
        if len(self._buffers) > 1 or piece.free or piece.buffer.k is None or piece.buffer.v is None:
            return None
        return piece.buffer.k.squeeze(0), piece.buffer.v.squeeze(0)  # an index would copy

    def size_for(self, num_recent: int) -> int:
        """Return the size of the buffer that the newest tokens move to when all others are encoded."""
        room = self.capacity - self.num_tokens
        most = FREE_TOKENS if self._raw_tokens is None else max(0, self._raw_tokens - num_recent)
        return round_up(num_recent + min(room, most))

    def keep_only(self, recent: Sequence[mx.array], num_recent: int) -> None:
        """Drop all buffers for one with `recent`: K and V of `size_for` tokens, or empty where no token stays."""
        room = self.capacity - self.num_tokens
        tail = Piece(KvBuffer(self.size_for(num_recent), self._shape), num_recent)
        if recent:
            tail.buffer.adopt(*recent)
        self._buffers = [tail]
        self._unallocated = max(0, room - tail.free)
        self.version += 1


def _piece(num_tokens: int, shape: KvShape | None) -> Piece:
    return Piece(KvBuffer(round_up(num_tokens), shape))
