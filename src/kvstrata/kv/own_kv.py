"""KV that one sequence computed in one layer: encoded segments, then raw buffers.

While the sequence runs, its past tokens are encoded, or sealed, and their buffers are freed.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.attention.segments import SealedSegment, Segment, cut_segments
from kvstrata.codecs.base import Codec, copy_rows
from kvstrata.codecs.raw import RawCodec
from kvstrata.kv.buffers import KvBufferList
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.work_sizes import WorkSizes, join_segments, slices, work_sizes_for


class OwnKV:
    """KV of one sequence in one layer. Sealed segments cover the oldest tokens, buffers all later ones."""

    def __init__(self, start: int, buffers: KvBufferList) -> None:
        self.start = start  # position of the first token
        self.buffers = buffers  # raw tokens; the sequence's layer writes there
        self.sealed: tuple[SealedSegment, ...] = ()
        self.sealed_tokens = 0  # a sum, kept because each step plan reads it
        self.sealed_bytes = 0

    @property
    def end(self) -> int:
        return self._raw_start + self.buffers.num_tokens

    @property
    def nbytes(self) -> int:
        return self.sealed_bytes + self.buffers.nbytes

    def segments(self, start: int, end: int) -> tuple[Segment, ...]:
        """Return the segments of positions [start, end), valid until the next write."""
        return tuple(cut_segments((*self.sealed, *self.buffers.segments()), start - self.start, end - self.start))

    def whole_arrays(self) -> tuple[mx.array, mx.array] | None:
        """Return K and V if they fill one buffer exactly. The caller may keep the buffer if nobody writes it again."""
        return None if self.sealed else self.buffers.whole_arrays()

    def replace_segment(self, segment: SealedSegment, by: SealedSegment) -> None:
        """Replace a sealed segment by another of the same tokens."""
        if (segment.k.position, segment.k.end) != (by.k.position, by.k.end):
            raise ValueError(
                f"a segment of tokens {segment.k.position} to {segment.k.end} cannot be replaced by one of tokens "
                f"{by.k.position} to {by.k.end}"
            )
        at = self.sealed.index(segment)
        self._set_sealed((*self.sealed[:at], by, *self.sealed[at + 1 :]))

    def num_to_encode(self, window: RawWindow) -> int:
        """Return how many tokens `encode_past` would encode."""
        num_raw = self.buffers.num_tokens
        first = min(max(0, window.first_tokens - self._raw_start), num_raw)
        return max(0, num_raw - window.recent_tokens - first)

    def encode_past_at_once(self, k: Codec, v: Codec, window: RawWindow) -> int:
        """Encode past tokens, all steps at once. Return how many were encoded."""
        num_tokens = self.num_to_encode(window)
        for _ in self.encode_past(k, v, window):
            pass
        return num_tokens

    def encode_past(self, k: Codec, v: Codec, window: RawWindow) -> Iterator[None]:
        """Encode the raw tokens that are present now, in small steps, except for those of the raw window. Readers see
        the raw tokens until all are encoded.

        The newest tokens move to a new buffer with some free slots. All other buffers are freed; their free slots are
        allocated again when they are needed.
        """
        num_tokens = self.num_to_encode(window)
        if not num_tokens:
            return
        sealed_before, sizes = self.sealed_tokens, self._work_sizes()
        end = self.end - window.recent_tokens
        start = end - num_tokens
        encoded: list[SealedSegment] = []
        for a, b in slices(start, end, sizes.slice_tokens):
            encoded.append(self._encode(a, b, k, v))
            if b % sizes.segment_tokens == 0 or b == end:
                encoded = sizes.join_neighbours(encoded)
            yield
            if self.sealed_tokens != sealed_before:
                return  # another run of this method has finished first
        sealed = [*self.sealed, *self._move_newest(start, end), encoded[0]]
        _join_last(sealed, sizes)
        self._set_sealed((*sealed, *encoded[1:]))

    @property
    def _raw_start(self) -> int:
        return self.start + self.sealed_tokens

    def _work_sizes(self) -> WorkSizes:
        return work_sizes_for(sum(array.shape[1] * array.shape[3] for array in self.buffers.arrays()[:2]))

    def _encode(self, start: int, end: int, k: Codec, v: Codec) -> SealedSegment:
        # The raw arrays must not outlive this call: they would make the owner's next write a copy of the whole buffer.
        k_raw, v_raw = self._raw_arrays(start, end)
        return SealedSegment(k.encode(k_raw, start), v.encode(v_raw, start))

    def _raw_arrays(self, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Return K and V, [kv_heads, tokens, dim], of unsealed positions [start, end)."""
        raw = tuple(cut_segments(self.buffers.segments(), start - self._raw_start, end - self._raw_start))
        k, v = segments_to_arrays(raw, self.buffers.arrays()[0].dtype)
        return k.squeeze(0), v.squeeze(0)  # an index would copy

    def _move_newest(self, first_end: int, start: int) -> list[SealedSegment]:
        """Move raw tokens from position `start` on to a buffer of their own. Return the tokens before `first_end`
        as a raw sealed segment."""
        end, first_start = self.end, self._raw_start
        size = self.buffers.size_for(end - start)
        recent = self._raw_arrays(start, end) if start < end else ()
        first = self._raw_arrays(first_start, first_end) if first_start < first_end else ()
        kept = [copy_rows(array, 0, array.shape[1]) for array in first]
        moved = [_padded_copy(array[None], size) for array in recent]
        mx.eval(moved, kept)  # together: the host waits for each evaluation
        self.buffers.keep_only(moved, end - start)
        return [SealedSegment(*(RawCodec().adopt(array, first_start) for array in kept))] if kept else []

    def _set_sealed(self, segments: tuple[SealedSegment, ...]) -> None:
        self.buffers.version += 1
        self.sealed = segments
        self.sealed_tokens = sum(segment.num_tokens for segment in segments)
        self.sealed_bytes = sum(segment.nbytes for segment in segments)


def _join_last(segments: list[SealedSegment], sizes: WorkSizes) -> None:
    """Join the last segments while they have similar sizes and the same codecs, up to `segment_tokens`: there are few
    segments, and each token is copied a few times only."""
    while len(segments) > 1:
        a, b = segments[-2:]
        is_similar = a.num_tokens <= 2 * b.num_tokens or b.k.end % sizes.segment_tokens == 0
        if not is_similar or not sizes.may_join(a, b):
            return
        segments[-2:] = [join_segments((a, b))]


def _padded_copy(array: mx.array, size: int) -> mx.array:
    """Copy an array to memory of its own, with zeros after it up to `size` tokens."""
    missing = size - array.shape[2]
    if not missing:
        return copy_rows(array, 0, size)
    zeros = mx.zeros((*array.shape[:2], missing, array.shape[3]), array.dtype)
    return mx.concatenate([array, zeros], axis=2)
