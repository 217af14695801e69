"""Full attention layer of one sequence: the cached prefix, then the sequence's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kvstrata.attention.segments import KvSlot, Segment, SegmentSource, SlotPlace
from kvstrata.kv.attention_layer import AttentionLayer, Versioned
from kvstrata.kv.buffers import KvBuffer, KvBufferList, KvShape
from kvstrata.kv.own_kv import OwnKV


class FullLayer(AttentionLayer):
    """`before` are tokens that other objects hold. Their owner may still write them; this layer never does."""

    def __init__(
        self,
        capacity: int,
        before: Sequence[SegmentSource] = (),
        raw_tokens: int | None = None,
        shape: KvShape | None = None,
    ) -> None:
        """`capacity`: own tokens that may be written. `raw_tokens`: most of them that have buffers at once, if older
        ones are sealed in time; None: all."""
        super().__init__(sum(source.num_tokens for source in before))
        self._prefix = tuple(before)
        self._buffers = KvBufferList(capacity, raw_tokens, shape)
        self.own = OwnKV(self.offset, self._buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of the sequence's own tokens: the prefix is counted by its holder."""
        return self.own.nbytes

    @property
    def token_bytes(self) -> int:
        return self._buffers.token_bytes

    def arrays(self) -> list[mx.array]:
        return self._buffers.arrays()

    def grow(self, tokens: int) -> None:
        self._buffers.grow(tokens)

    def append(self, k: mx.array, v: mx.array) -> None:
        """Write tokens. The caller has made sure that they fit."""
        self._count(k.shape[2], self._buffers.append(k, v))

    def next_slot(self) -> KvSlot:
        slot = self._buffers.next_slot()
        if slot is None:
            raise self._overflow(1)
        return slot

    def count_next(self) -> None:
        self._buffers.count_next()
        self.offset += 1

    def next_place(self) -> SlotPlace:
        used = self._buffers.next_buffer.used
        return SlotPlace(used, used + 1)

    @property
    def most_tokens(self) -> int:
        return 0

    def watched(self) -> list[Versioned]:
        return [self._buffers, *self._prefix]

    def next_buffer(self) -> KvBuffer | None:
        return self._buffers.next_buffer

    def put_last(self, k: mx.array, v: mx.array) -> None:
        self._buffers.put_last(k, v)

    def segments_before(self) -> tuple[Segment, ...]:
        """Return all segments that the layer reads, except for the buffer that the next token goes to."""
        self._buffers.reserve(1)
        if not (self._prefix or self.own.sealed or self._buffers.num_full):
            return ()
        return (*self._read_only_segments(), *self._buffers.full_segments())

    def _count(self, wanted: int, written: int) -> None:
        if written != wanted:
            raise self._overflow(wanted)
        self.offset += wanted

    def _overflow(self, wanted: int) -> IndexError:
        return IndexError(f"{wanted} tokens do not fit: {self._buffers.capacity} reserved, {self.offset} used")

    def segments(self) -> tuple[Segment, ...]:
        return (*self._read_only_segments(), *self._buffers.segments())

    def _read_only_segments(self) -> tuple[Segment, ...]:
        """Return the segments that this layer does not write: the prefix and its own sealed tokens."""
        return (*(segment for source in self._prefix for segment in source.segments()), *self.own.sealed)

    def drop_replaced_segments(self) -> None:
        """Have the prefix's sources look up their segments anew: a source keeps those of the last step alive."""
        for source in self._prefix:
            source.segments()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        if window_size is not None:
            return create_causal_mask(N, self.offset, window_size=window_size)
        if N == 1:
            return None
        return create_causal_mask(N, self.offset) if return_array else "causal"
