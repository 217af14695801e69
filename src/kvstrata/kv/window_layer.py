"""Sliding-window attention layer of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.attention.segments import KvSlot, RawSegment, Segment, SlotPlace
from kvstrata.kv.attention_layer import AttentionLayer, Versioned
from kvstrata.kv.buffers import KvBuffer, KvShape


@dataclass(frozen=True)
class Ring:
    """A ring of `max_size` slots. Tokens before `keep` stay in place; later tokens overwrite the oldest others."""

    max_size: int
    keep: int = 0

    def slot(self, position: int) -> int:
        if position < self.keep:
            return position
        return self.keep + (position - self.keep) % (self.max_size - self.keep)

    def held_slots(self, num_tokens: int) -> NDArray[np.int32]:
        """Return the slots, by position, of all tokens that the ring still holds after `num_tokens`."""
        kept, others = np.arange(min(self.keep, num_tokens)), np.arange(self.oldest(num_tokens), num_tokens)
        return np.concatenate([kept, self._slots(others)]).astype(np.int32)

    def _slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        wrapped = self.keep + (positions - self.keep) % (self.max_size - self.keep)
        return np.where(positions < self.keep, positions, wrapped)

    def oldest(self, num_tokens: int) -> int:
        """Return the first position, beside the kept ones, that the ring still holds after `num_tokens`."""
        return min(num_tokens, max(self.keep, num_tokens - (self.max_size - self.keep)))

    def runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the positions of [start, end) that the ring will hold, cut where their slots are not consecutive."""
        size = self.max_size - self.keep
        runs = [(start, min(end, self.keep))] if start < self.keep else []
        first = max(start, self.keep, end - size)
        while first < end:
            last = min(end, first + size - (first - self.keep) % size)
            runs.append((first, last))
            first = last
        return runs

    def chunk_mask(self, offset: int, num_tokens: int, window: int) -> mx.array:
        """Mask a chunk's queries over past and chunk: each query sees the kept tokens and the newest `window`."""
        past = min(offset, self.max_size - 1)
        columns = mx.arange(past + num_tokens)
        # Kept tokens are at their own position; the others end where the chunk ends.
        positions = mx.where(columns < self.keep, columns, columns + (offset - past))
        queries = mx.arange(offset, offset + num_tokens)[:, None]
        return (positions <= queries) & ((positions < self.keep) | (positions > queries - window))

    def narrow_mask(self, offset: int, window: int) -> mx.array:
        """Mask the query at `offset` over all slots, for a model whose window is narrower than the ring that the model
        asked for."""
        newest = np.arange(max(0, offset + 1 - self.max_size), offset + 1)
        positions = np.full(min(self.max_size, offset + 1), -1, np.int32)
        positions[self._slots(newest)] = newest  # where two positions share a slot, the later one counts
        return mx.array(positions) > offset - window


class WindowLayer(AttentionLayer):
    def __init__(self, max_size: int, keep: int = 0, shape: KvShape | None = None) -> None:
        super().__init__(0)
        self.ring = Ring(max_size, keep)
        self._buffer = KvBuffer(max_size, shape)
        self._chunk: RawSegment | None = None  # read by the queries of a chunk, until the pass ends

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def token_bytes(self) -> int:
        return self._buffer.token_bytes

    def arrays(self) -> list[mx.array]:
        return self._buffer.arrays()

    def grow(self, tokens: int) -> None:
        """Do nothing: the ring has its full size from the start."""

    def copy_state(self) -> tuple[mx.array, mx.array]:
        """Return K and V of the held tokens by position, in memory of their own: [1, kv_heads, tokens, dim]."""
        raw, slots = self._held_segment(), mx.array(self.ring.held_slots(self.offset))
        k, v = mx.take(raw.k, slots, axis=2), mx.take(raw.v, slots, axis=2)
        mx.eval(k, v)
        return k, v

    def resume(self, k: mx.array, v: mx.array, offset: int) -> None:
        """Restore tokens that `copy_state` of a ring of this size returned, or the first `offset` of them if that ring
        had dropped none."""
        self.offset = offset
        kept = min(self.ring.keep, offset)
        if kept:
            self._buffer.put(0, k[:, :, :kept], v[:, :, :kept])
        self._put(k[:, :, kept:], v[:, :, kept:], self.ring.oldest(offset), offset)
        mx.eval(self.arrays())

    def append(self, k: mx.array, v: mx.array) -> None:
        if k.shape[2] > 1:
            # Early queries of a chunk see tokens that the last tokens of the chunk overwrite in the ring.
            new = RawSegment(k, v, k.shape[2])
            self._chunk = _join(self._past(), new) if self.offset else new
        start, self.offset = self.offset, self.offset + k.shape[2]
        self._put(k, v, start, self.offset)

    def _put(self, k: mx.array, v: mx.array, start: int, end: int) -> None:
        """Write the tokens of positions [start, end) that the ring will hold."""
        for first, last in self.ring.runs(start, end):
            new = slice(first - start, last - start)
            self._buffer.put(self.ring.slot(first), k[:, :, new], v[:, :, new])

    def next_slot(self) -> KvSlot:
        return self._buffer.slot(*self.next_place())

    def count_next(self) -> None:
        self.offset += 1

    def next_place(self) -> SlotPlace:
        return SlotPlace(self.ring.slot(self.offset), min(self.offset + 1, self.ring.max_size))

    @property
    def most_tokens(self) -> int:
        return self.ring.max_size

    def watched(self) -> list[Versioned]:
        return [self._buffer.views]

    def next_buffer(self) -> KvBuffer | None:
        """Return None: a ring never ends."""
        return None

    def put_last(self, k: mx.array, v: mx.array) -> None:
        self._buffer.put(self.ring.slot(self.offset - 1), k, v)

    def segments_before(self) -> tuple[Segment, ...]:
        """Return no segments: the layer reads the ring alone."""
        return ()

    def segments(self) -> tuple[RawSegment, ...]:
        return (self._chunk or self._held_segment(),)

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

    def _held_segment(self) -> RawSegment:
        return self._buffer.segment(min(self.offset, self.ring.max_size))

    def _past(self) -> RawSegment:
        """Return the newest max_size - 1 tokens, oldest first: all that a further token can see."""
        held, ring = self._held_segment(), self.ring
        if self.offset < ring.max_size:
            return held
        # Drop the oldest token that is not kept; the others in order of position.
        oldest = ring.slot(self.offset)
        cut = [(0, ring.keep), (oldest + 1, ring.max_size), (ring.keep, oldest)]
        pieces = [RawSegment(held.k[:, :, a:b], held.v[:, :, a:b], b - a) for a, b in cut if a < b]
        return _join(*pieces)


def _join(*segments: RawSegment) -> RawSegment:
    k, v = segments_to_arrays(segments, segments[0].k_buffer.dtype)
    return RawSegment(k, v, k.shape[2])
