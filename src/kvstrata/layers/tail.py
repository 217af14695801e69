"""Full attention, one sequence: preallocated buffers that are written in place.

Buffers come in pieces: the first is sized from the request, later ones are added while it runs. No piece is ever copied
into another, so growing costs only what it adds.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kvstrata.layers.attention import Part, Parts


class Buffer:
    """One piece: `size` tokens of K and V, the first `used` of them written."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._k: mx.array | None = None  # [1, kv_heads, size, k_dim], allocated by the first write
        self._v: mx.array | None = None

    @property
    def free(self) -> int:
        return self.size - self.used

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return [array for array in (self._k, self._v) if array is not None]

    def write(self, k: mx.array, v: mx.array) -> None:
        if self._k is None or self._v is None:
            self._k = mx.zeros((1, k.shape[1], self.size, k.shape[3]), k.dtype)
            self._v = mx.zeros((1, v.shape[1], self.size, v.shape[3]), v.dtype)
        end = self.used + k.shape[2]
        # In place as long as nobody holds a view of an earlier version: views live for one forward pass only.
        self._k[:, :, self.used : end] = k
        self._v[:, :, self.used : end] = v
        self.used = end

    def part(self) -> Part:
        assert self._k is not None
        assert self._v is not None
        return Part(self._k, self._v, self.used)


class FullLayer:
    def __init__(self, capacity: int) -> None:
        self.offset = 0
        self._buffers = [Buffer(capacity)]

    @property
    def capacity(self) -> int:
        return sum(buffer.size for buffer in self._buffers)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def token_bytes(self) -> int:
        return self._buffers[0].nbytes // self._buffers[0].size

    def arrays(self) -> list[mx.array]:
        return [array for buffer in self._buffers for array in buffer.arrays()]

    def grow(self, tokens: int) -> None:
        self._buffers.append(Buffer(tokens))

    def write(self, k: mx.array, v: mx.array) -> None:
        """Append tokens; the caller has made sure that there is room."""
        start, total = 0, k.shape[2]
        for buffer in self._buffers:
            count = min(buffer.free, total - start)
            if count:
                buffer.write(k[:, :, start : start + count], v[:, :, start : start + count])
                start += count
        if start != total:
            raise IndexError(f"{total} tokens do not fit: {self.capacity} reserved, {self.offset} used")
        self.offset += total

    def parts(self) -> tuple[Part, ...]:
        return tuple(buffer.part() for buffer in self._buffers if buffer.used)

    def end_pass(self) -> None:
        """Nothing is kept for the pass."""

    # What mlx-lm's models call.

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        self.write(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Parts, Parts]:
        parts = Parts((self.parts(),))
        return parts, parts

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        if window_size is not None:
            return create_causal_mask(N, self.offset, window_size=window_size)
        if N == 1:
            return None
        return create_causal_mask(N, self.offset) if return_array else "causal"
