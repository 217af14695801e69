"""Full attention layer of one sequence: the cached prefix, then the sequence's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda.step import KvSlot
from kvstrata.attention.cuda.tables import SlotPlace
from kvstrata.attention.run_cache import RunCache
from kvstrata.attention.segments import Segment, SegmentSource
from kvstrata.kv.attention_layer import AttentionLayer, Watched
from kvstrata.kv.buffers import KvBufferList, KvShape, Piece
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
        self._runs = RunCache()

    @property
    def nbytes(self) -> int:
        """Bytes of the sequence's own tokens: the prefix is counted by its holder."""
        return self.own.nbytes

    @property
    def token_bytes(self) -> int:
        return self._buffers.token_bytes

    @property
    def has_runs(self) -> bool:
        return self._runs.covers(self._read_only_segments())

    def arrays(self) -> list[mx.array]:
        return self._buffers.arrays()

    def grow(self, tokens: int) -> None:
        self._buffers.grow(tokens)

    def append(self, k: mx.array, v: mx.array) -> None:
        """Write tokens. The caller has made sure that they fit."""
        self._count(k.shape[2], self._buffers.append(k, v))

    def runs_with_next(self) -> list[cpu_step.TokenRun]:
        """Reserve a slot for one more token, which the caller writes where the runs say. Only if `has_runs`."""
        runs, is_placed = self._buffers.runs_with_next()
        self._count(1, int(is_placed))
        return [*self._runs.of(self._read_only_segments()), *runs]

    def next_slot(self) -> KvSlot:
        slot = self._buffers.next_slot()
        if slot is None:
            raise self._no_room(1)
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

    def watched(self) -> list[Watched]:
        return [self._buffers, *self._prefix]

    def next_buffer(self) -> Piece | None:
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
            raise self._no_room(wanted)
        self.offset += wanted

    def _no_room(self, wanted: int) -> IndexError:
        return IndexError(f"{wanted} tokens do not fit: {self._buffers.capacity} reserved, {self.offset} used")

    def segments(self) -> tuple[Segment, ...]:
        return (*self._read_only_segments(), *self._buffers.segments())

    def _read_only_segments(self) -> tuple[Segment, ...]:
        """Return the segments that this layer does not write: the prefix and its own sealed tokens."""
        return (*(part for source in self._prefix for part in source.segments()), *self.own.sealed)

    def drop_stale_views(self) -> None:
        """Drop what the layer keeps of segments that were transcoded."""
        self._runs.keep_only(self._read_only_segments())

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:  # noqa: N803
        if window_size is not None:
            return create_causal_mask(N, self.offset, window_size=window_size)
        if N == 1:
            return None
        return create_causal_mask(N, self.offset) if return_array else "causal"
