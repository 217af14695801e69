"""A cache that passes what it stores through a codec: attention sees the values that a stored span would give back.

For measuring quality only. Nothing is kept encoded, but bytes are counted as if it were.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kvstrata.codecs.base import Codec


class EncodedSide:
    """K or V of one layer. The first tokens stay raw; the others are encoded in blocks as soon as a block is full."""

    def __init__(self, codec: Codec, first_raw: int, block: int) -> None:
        self._codec = codec
        self._first_raw = first_raw
        self._block = block
        self._done: mx.array | None = None  # [1, heads, tokens, dim]: raw and decoded, in order
        self._num_done = 0
        self._pending: mx.array | None = None  # not a whole block yet
        self.encoded_bytes = 0
        self.encoded_values = 0

    def add(self, x: mx.array) -> mx.array:
        pending = x if self._pending is None else mx.concatenate([self._pending, x], axis=2)
        if self._num_done < self._first_raw:
            count = min(self._first_raw - self._num_done, pending.shape[2])
            self._append(pending[:, :, :count])
            pending = pending[:, :, count:]
        # A prompt is encoded whole, as a span is; single tokens wait for their block.
        if pending.shape[2] >= self._block:
            self._append(self._passed_through(pending))
            pending = pending[:, :, :0]
        self._pending = pending
        return self._all()

    def arrays(self) -> list[mx.array]:
        return [array for array in (self._done, self._pending) if array is not None]

    def _append(self, x: mx.array) -> None:
        self._done = x if self._done is None else mx.concatenate([self._done, x], axis=2)
        self._num_done += x.shape[2]

    def _passed_through(self, x: mx.array) -> mx.array:
        planes = self._codec.encode(x[0], self._num_done)
        self.encoded_bytes += planes.nbytes
        self.encoded_values += planes.num_values
        return self._codec.decode(planes, x.dtype)[None]

    def _all(self) -> mx.array:
        parts = [part for part in self.arrays() if part.shape[2]]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


class EncodingLayer:
    """One layer of one sequence, as mlx-lm's models call it. A window is a mask over all tokens, not a ring."""

    def __init__(self, k: Codec, v: Codec, *, first_raw: int = 4, block: int = 1, window: int | None = None) -> None:
        self.offset = 0
        self._window = window
        self.k = EncodedSide(k, first_raw, block)
        self.v = EncodedSide(v, first_raw, block)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        return self.k.add(keys), self.v.add(values)

    def arrays(self) -> list[mx.array]:
        return self.k.arrays() + self.v.arrays()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        window_size = window_size or self._window
        if N == 1 and window_size is None:
            return None
        if return_array or window_size is not None:
            return create_causal_mask(N, self.offset, window_size=window_size)
        return "causal"
