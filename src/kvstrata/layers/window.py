"""Sliding-window attention, one sequence: a ring of tokens, allocated whole by the first write.

K is stored after RoPE, so a query may read the ring in whatever order it lies.
"""

from __future__ import annotations

import mlx.core as mx

from kvstrata.attention import cpu
from kvstrata.attention.cuda_step import Slot
from kvstrata.attention.cuda_tables import Place
from kvstrata.attention.parts import Part, Parts, RawPart
from kvstrata.layers.base import AttentionLayer, Watched
from kvstrata.layers.buffers import Buffer, KvShape
from kvstrata.layers.pieces import Piece
from kvstrata.layers.ring import Ring


class WindowLayer(AttentionLayer):
    def __init__(self, max_size: int, keep: int = 0, shape: KvShape | None = None) -> None:
        super().__init__(0)
        self.ring = Ring(max_size, keep)
        self._buffer = Buffer(max_size, shape)
        self._chunk: RawPart | None = None  # what the queries of a chunk read, until the pass ends

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def token_bytes(self) -> int:
        return self._buffer.token_bytes

    @property
    def has_runs(self) -> bool:
        return True

    def arrays(self) -> list[mx.array]:
        return self._buffer.arrays()

    def grow(self, tokens: int) -> None:
        """The ring has its full size from the start."""

    def held(self) -> tuple[mx.array, mx.array]:
        """K and V of what the ring holds, by position, in memory of their own: [1, kv_heads, tokens, dim]."""
        raw, slots = self._held_part(), mx.array(self.ring.held_slots(self.offset))
        k, v = mx.take(raw.k, slots, axis=2), mx.take(raw.v, slots, axis=2)
        mx.eval(k, v)
        return k, v

    def resume(self, k: mx.array, v: mx.array, offset: int) -> None:
        """Hold what another ring of this size `held`; or its first `offset` tokens, if it had not dropped any."""
        self.offset = offset
        kept = min(self.ring.keep, offset)
        if kept:
            self._buffer.put(0, k[:, :, :kept], v[:, :, :kept])
        self._put(k[:, :, kept:], v[:, :, kept:], self.ring.oldest(offset), offset)
        mx.eval(self.arrays())

    def append(self, k: mx.array, v: mx.array) -> None:
        if k.shape[2] > 1:
            # Early queries of a chunk see tokens that its last ones push out of the ring.
            new = RawPart(k, v, k.shape[2])
            self._chunk = _join(self._past(), new) if self.offset else new
        start, self.offset = self.offset, self.offset + k.shape[2]
        self._put(k, v, start, self.offset)

    def _put(self, k: mx.array, v: mx.array, start: int, end: int) -> None:
        """Tokens of positions [start, end), as far as the ring will hold them."""
        for first, last in self.ring.runs(start, end):
            new = slice(first - start, last - start)
            self._buffer.put(self.ring.slot(first), k[:, :, new], v[:, :, new])

    def runs_with_next(self) -> list[cpu.Run]:
        """Make room for one more token, which the caller writes where the run says."""
        at = self.ring.slot(self.offset)
        self.offset += 1
        return [cpu.Run(*self._buffer.addresses(), self._buffer.size, at, min(self.offset, self.ring.max_size))]

    def next_slot(self) -> Slot:
        buffer, ring = self._buffer, self.ring
        held = min(self.offset + 1, ring.max_size)
        return Slot(*buffer.allocate(), buffer.size, ring.slot(self.offset), held, buffer.where)

    def count_next(self) -> None:
        self.offset += 1

    def next_place(self) -> Place:
        return Place(self.ring.slot(self.offset), min(self.offset + 1, self.ring.max_size))

    @property
    def most_tokens(self) -> int:
        return self.ring.max_size

    def watched(self) -> list[Watched]:
        return [self._buffer.where]

    def next_piece(self) -> Piece | None:
        """A ring never ends."""
        return None

    def put_last(self, k: mx.array, v: mx.array) -> None:
        self._buffer.put(self.ring.slot(self.offset - 1), k, v)

    def before_slot(self) -> tuple[Part, ...]:
        """All that it reads beside the ring."""
        return ()

    def parts(self) -> tuple[RawPart, ...]:
        return (self._chunk or self._held_part(),)

    def end_pass(self) -> list[mx.array]:
        self._chunk = None
        return super().end_pass()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        max_size = self.ring.max_size
        if N == 1:
            return self.ring.narrow_mask(self.offset, window_size) if window_size and window_size < max_size else None
        window = min(window_size or max_size, max_size - self.ring.keep)
        if self.offset + N <= window and not return_array:
            return "causal"
        return self.ring.chunk_mask(self.offset, N, window)

    def _held_part(self) -> RawPart:
        return self._buffer.part(min(self.offset, self.ring.max_size))

    def _past(self) -> RawPart:
        """The newest max_size - 1 tokens, oldest first: all that a further token can see."""
        held, ring = self._held_part(), self.ring
        if self.offset < ring.max_size:
            return held
        # Drop the oldest token that is not kept; the others in order of position.
        oldest = ring.slot(self.offset)
        cut = [(0, ring.keep), (oldest + 1, ring.max_size), (ring.keep, oldest)]
        pieces = [RawPart(held.k[:, :, a:b], held.v[:, :, a:b], b - a) for a, b in cut if a < b]
        return _join(*pieces)


def _join(*parts: RawPart) -> RawPart:
    k, v = Parts((parts,)).joined(parts[0].k_buffer)
    return RawPart(k, v, k.shape[2])
