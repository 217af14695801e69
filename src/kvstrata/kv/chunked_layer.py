"""Chunked attention layer of one sequence: a token sees only its own chunk of positions, up to itself.

A buffer of one chunk is therefore enough: the first write allocates it whole, and the next chunk overwrites it. The
model makes the mask from the integers `start_position` and `offset`, so sequences decode one at a time.
"""

from __future__ import annotations

import mlx.core as mx

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.attention.segments import RawSegment
from kvstrata.kv.buffers import KvBuffer, owned


class ChunkedLayer:
    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.offset = 0
        self._chunk = KvBuffer(chunk_size)

    @property
    def nbytes(self) -> int:
        return self._chunk.nbytes

    @property
    def token_bytes(self) -> int:
        return self._chunk.token_bytes

    @property
    def start_position(self) -> int:
        """The first position that the next token can see."""
        return self.offset - self.offset % self.chunk_size

    def arrays(self) -> list[mx.array]:
        return self._chunk.arrays()

    def grow(self, tokens: int) -> None:
        """Do nothing: the buffer has its full size from the start."""

    def end_pass(self) -> list[mx.array]:
        """Return nothing: the layer keeps nothing for the pass, and MLX knows of all writes."""
        return []

    def copy_state(self) -> tuple[mx.array, mx.array]:
        """Return K and V of the newest token's chunk, in memory of their own: [1, kv_heads, tokens, dim]."""
        raw = self._chunk.segment((self.offset - 1) % self.chunk_size + 1)
        k, v = owned(raw.k), owned(raw.v)
        mx.eval(k, v)
        return k, v

    def resume(self, k: mx.array, v: mx.array, offset: int) -> None:
        """Resume at `offset` from K and V of a `copy_state`: in that chunk, or at the start of any chunk."""
        self.offset = offset
        past = offset % self.chunk_size
        if past:
            self._chunk.put(0, k[:, :, :past], v[:, :, :past])
            mx.eval(self.arrays())

    # The interface for mlx-lm's models.

    def maybe_trim_front(self) -> None:
        """Do nothing: the next chunk overwrites the present one."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write tokens, and return K and V from `start_position` on."""
        past, count = self.offset % self.chunk_size, keys.shape[2]
        if past + count <= self.chunk_size:
            self._append(keys, values)
            seen = self._chunk.segment(past + count)
            return seen.k, seen.v
        # The pass reaches into the next chunk, whose tokens overwrite tokens that the first queries of the pass see.
        new = RawSegment(keys, values, count)
        fetched = segments_to_arrays((self._chunk.segment(past), new) if past else (new,), keys.dtype)
        self._append(keys, values)
        return fetched

    def _append(self, k: mx.array, v: mx.array) -> None:
        end = self.offset + k.shape[2]
        # Only the last token's chunk is written: no later token sees the others.
        first = max(self.offset, (end - 1) - (end - 1) % self.chunk_size)
        new = slice(first - self.offset, k.shape[2])
        self._chunk.put(first % self.chunk_size, k[:, :, new], v[:, :, new])
        self.offset = end
