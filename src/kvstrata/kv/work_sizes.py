"""Work sizes: bounds on the tokens of one step of work, so that no step takes long, however long a sequence is.

Tokens are cached in segments and encoded in slices. Both end at multiples of powers of two
that are also ends of the codecs' groups, so the codes do not depend on the cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.backends import runtime
from kvstrata.codecs.mean_runs import GROUP_TOKENS
from kvstrata.kv.layout import LayerSpec

# Values (K and V, all heads) of one layer that are copied (segments) or encoded (slices) in some milliseconds.
SEGMENT_VALUES_CPU, SLICE_VALUES_CPU = 2 << 20, 512 << 10

SEGMENT_VALUES_GPU, SLICE_VALUES_GPU = 64 << 20, 16 << 20


@dataclass(frozen=True)
class WorkSizes:
    """Work sizes of a layer in tokens: powers of two, so that slices make up segments."""

    segment_tokens: int  # most tokens of a cached segment
    slice_tokens: int  # tokens that are encoded or decoded at once

    def may_join(self, a: SealedSegment, b: SealedSegment) -> bool:
        """Whether neighbours have the same codecs and fit one segment."""
        is_alike = (a.k.codec, a.v.codec) == (b.k.codec, b.v.codec)
        return is_alike and a.k.position // self.segment_tokens == (b.k.end - 1) // self.segment_tokens

    def join_neighbours(self, segments: Sequence[SealedSegment]) -> list[SealedSegment]:
        """Join neighbours that fit one segment."""
        groups: list[list[SealedSegment]] = []
        for segment in segments:
            if groups and self.may_join(groups[-1][0], segment):
                groups[-1].append(segment)
            else:
                groups.append([segment])
        return [join_segments(group) for group in groups]


def join_segments(segments: Sequence[SealedSegment]) -> SealedSegment:
    """Join neighbours of the same codecs in pairs: a token is copied a few times, not once for each later segment."""
    while len(segments) > 1:
        segments = [_join_two(*segments[i : i + 2]) for i in range(0, len(segments), 2)]
    return segments[0]


def _join_two(a: SealedSegment, b: SealedSegment | None = None) -> SealedSegment:
    return a if b is None else SealedSegment(a.k.codec.join(a.k, b.k), a.v.codec.join(a.v, b.v))


def slices(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield [start, end), cut at multiples of `size`."""
    while start < end:
        stop = min(end, start - start % size + size)
        yield start, stop
        start = stop


def work_sizes_of(spec: LayerSpec) -> WorkSizes:
    return work_sizes_for(spec.kv_heads * (spec.k_dim + spec.v_dim))


def work_sizes_for(token_values: int) -> WorkSizes:
    """Return the work sizes of a layer whose tokens have `token_values` values each."""
    # Metal's path uses a GPU's sizes on whatever machine it runs.
    is_cpu = runtime().backend in ("cpu", "plain") and mx.default_device() == mx.cpu
    in_segment = SEGMENT_VALUES_CPU if is_cpu else SEGMENT_VALUES_GPU
    in_slice = SLICE_VALUES_CPU if is_cpu else SLICE_VALUES_GPU
    return WorkSizes(_tokens(in_segment, token_values), _tokens(in_slice, token_values))


def _tokens(num_values: int, token_values: int) -> int:
    """Return the largest power of two of tokens that fits `num_values`, and at least one group."""
    fits = num_values // max(1, token_values)
    return max(GROUP_TOKENS, 1 << max(0, fits.bit_length() - 1))
