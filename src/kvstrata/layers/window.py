"""Sliding-window attention, one sequence: a ring of `max_size` tokens, allocated whole by the first write.

Tokens before `keep` stay where they are; the others go round. K is stored after RoPE, so a query may read the ring in
whatever order it lies.
"""

from __future__ import annotations

import mlx.core as mx

from kvstrata.attention import cpu, cuda_rows
from kvstrata.attention.attend import Keys
from kvstrata.attention.cuda_step import Slot
from kvstrata.attention.parts import Part, Parts, RawPart
from kvstrata.layers.buffers import Buffer


class WindowLayer:
    def __init__(self, max_size: int, keep: int = 0) -> None:
        self.max_size = max_size
        self.keep = keep
        self.offset = 0
        self._ring = Buffer(max_size)
        self._counters = cuda_rows.Counters()
        self._step: cuda_rows.Step | None = None
        self._chunk: RawPart | None = None  # what the queries of a chunk read, until the pass ends

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes

    @property
    def token_bytes(self) -> int:
        return self._ring.token_bytes

    @property
    def has_runs(self) -> bool:
        return True

    def arrays(self) -> list[mx.array]:
        return self._ring.arrays()

    def grow(self, tokens: int) -> None:
        """The ring has its full size from the start."""

    def held(self) -> tuple[mx.array, mx.array]:
        """K and V of what the ring holds, by position, in memory of their own: [1, kv_heads, tokens, dim]."""
        raw = self._ring_part()
        order = [*range(min(self.keep, self.offset))]
        order += [self._slot(position) for position in range(self._oldest(), self.offset)]
        slots = mx.array(order)
        k, v = mx.take(raw.k, slots, axis=2), mx.take(raw.v, slots, axis=2)
        mx.eval(k, v)
        return k, v

    def resume(self, k: mx.array, v: mx.array, offset: int) -> None:
        """Hold what another ring of this size `held`; or its first `offset` tokens, if it had not dropped any."""
        self.offset = offset
        kept = min(self.keep, offset)
        if kept:
            self._ring.put(0, k[:, :, :kept], v[:, :, :kept])
        start = self._oldest()
        for first, last in self._runs(start, offset):
            rest = slice(kept + first - start, kept + last - start)
            self._ring.put(self._slot(first), k[:, :, rest], v[:, :, rest])
        mx.eval(self.arrays())

    def _oldest(self) -> int:
        """The first position that the ring holds beside the kept ones."""
        return min(self.offset, max(self.keep, self.offset - (self.max_size - self.keep)))

    def append(self, k: mx.array, v: mx.array) -> None:
        if k.shape[2] > 1:
            # Early queries of a chunk see tokens that its last ones push out of the ring.
            new = RawPart(k, v, k.shape[2])
            self._chunk = _join(self._past(), new) if self.offset else new
        start, end = self.offset, self.offset + k.shape[2]
        for first, last in self._runs(start, end):
            new = slice(first - start, last - start)
            self._ring.put(self._slot(first), k[:, :, new], v[:, :, new])
        self.offset = end

    def runs_with_next(self, k: mx.array, v: mx.array) -> list[cpu.Run]:
        """Make room for one more token, which the caller writes where the run says."""
        at = self._slot(self.offset)
        self.offset += 1
        return [cpu.Run(*self._ring.addresses(k, v), self._ring.size, at, min(self.offset, self.max_size))]

    def slot_for_next(self, k: mx.array, v: mx.array) -> Slot:
        """Make room for one more token, which the caller writes there, or has written by `put_last`."""
        at = self._slot(self.offset)
        k_ring, v_ring = self._ring.allocate(k, v)
        self.offset += 1
        return Slot(k_ring, v_ring, self._ring.size, at, min(self.offset, self.max_size))

    def put_last(self, k: mx.array, v: mx.array) -> None:
        self._ring.put(self._slot(self.offset - 1), k, v)

    def before_slot(self) -> tuple[Part, ...]:
        """All that it reads beside the ring."""
        return ()

    def parts(self) -> tuple[RawPart, ...]:
        return (self._chunk or self._ring_part(),)

    def end_pass(self) -> list[mx.array]:
        """What has to be issued before the next pass."""
        self._chunk = None
        step, self._step = self._step, None
        return step.launched if step else []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Keys, Keys]:
        if cpu.pays_alone(min(self.offset, self.max_size), keys, values):
            step = cpu.Step((self,), keys, values)
            return step, step
        if cuda_rows.fits(keys, values):
            self._step = cuda_rows.Step((self,), keys, values, self._counters)
            return self._step, self._step
        self.append(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Keys, Keys]:
        parts = self._step or Parts((self.parts(),))
        return parts, parts

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        if N == 1:
            return self._narrow_mask(window_size) if window_size and window_size < self.max_size else None
        window = min(window_size or self.max_size, self.max_size - self.keep)
        if self.offset + N <= window and not return_array:
            return "causal"
        return self._chunk_mask(N, window)

    def _chunk_mask(self, num_tokens: int, window: int) -> mx.array:
        """Queries of a chunk over the past and the chunk: each sees the kept tokens and the newest `window`."""
        past = min(self.offset, self.max_size - 1)
        columns = mx.arange(past + num_tokens)
        # Kept tokens lie at their own position; the others end where the chunk ends.
        positions = mx.where(columns < self.keep, columns, columns + (self.offset - past))
        queries = mx.arange(self.offset, self.offset + num_tokens)[:, None]
        return (positions <= queries) & ((positions < self.keep) | (positions > queries - window))

    def _narrow_mask(self, window_size: int) -> mx.array:
        """One query over the ring, for a model whose window is narrower than the ring that it asked for."""
        positions = [-1] * min(self.max_size, self.offset + 1)
        for position in range(max(0, self.offset + 1 - self.max_size), self.offset + 1):
            positions[self._slot(position)] = position
        return mx.array(positions) > self.offset - window_size

    def _slot(self, position: int) -> int:
        if position < self.keep:
            return position
        return self.keep + (position - self.keep) % (self.max_size - self.keep)

    def _runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """The positions of [start, end) that the ring will hold, cut where their slots are not consecutive."""
        ring = self.max_size - self.keep
        runs = [(start, min(end, self.keep))] if start < self.keep else []
        first = max(start, self.keep, end - ring)
        while first < end:
            last = min(end, first + ring - (first - self.keep) % ring)
            runs.append((first, last))
            first = last
        return runs

    def _ring_part(self) -> RawPart:
        assert self._ring.k is not None
        assert self._ring.v is not None
        return RawPart(self._ring.k, self._ring.v, min(self.offset, self.max_size))

    def _past(self) -> RawPart:
        """The newest max_size - 1 tokens, oldest first: all that a further token can see."""
        held = self._ring_part()
        if self.offset < self.max_size:
            return held
        # Drop the oldest token that is not kept; the others in order of position.
        oldest = self._slot(self.offset)
        cut = [(0, self.keep), (oldest + 1, self.max_size), (self.keep, oldest)]
        pieces = [RawPart(held.k[:, :, a:b], held.v[:, :, a:b], b - a) for a, b in cut if a < b]
        return _join(*pieces)


def _join(*parts: RawPart) -> RawPart:
    k, v = Parts((parts,)).joined(parts[0].k_buffer)
    return RawPart(k, v, k.shape[2])
