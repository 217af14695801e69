"""The reference over segments: scores of each segment, one softmax over all, weighted sums of the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from kvstrata.attention.segments import RawSegment, Segment, SegmentedKV

Softmax = Callable[[mx.array], mx.array]  # over the last axis, in float32; may overwrite its argument

AttendRow = Callable[[mx.array, Sequence[Segment], float, mx.array | None], mx.array]

softmax: Softmax = partial(mx.softmax, axis=-1, precise=True)


def attend_row(
    q: mx.array,  # [1, heads, 1, k_dim]
    segments: Sequence[Segment],
    scale: float,
    sinks: mx.array | None,  # [heads]
    softmax: Softmax = softmax,
) -> mx.array:
    """Attend with one query for each head over the segments of a row -> [1, heads, 1, v_dim]"""
    only = segments[0] if len(segments) == 1 else None
    if isinstance(only, RawSegment):
        return mx.fast.scaled_dot_product_attention(q, only.k, only.v, scale=scale, sinks=sinks)
    return attend_segments(q, segments, scale, sinks, softmax)


def attend_rows(
    q: mx.array, kv: SegmentedKV, scale: float, sinks: mx.array | None, attend: AttendRow = attend_row
) -> mx.array:
    """Attend with q [rows, heads, 1, k_dim] row by row."""
    rows = mx.split(q, len(kv.rows)) if len(kv.rows) > 1 else [q]
    out = [attend(row, segments, scale, sinks) for row, segments in zip(rows, kv.rows, strict=True)]
    return mx.concatenate(out) if len(out) > 1 else out[0]


def attend_segments(
    q: mx.array, segments: Sequence[Segment], scale: float, sinks: mx.array | None, softmax: Softmax = softmax
) -> mx.array:
    """Attend as `attend_row` does, in float32 whatever the model's dtype. Only scores are concatenated."""
    heads, kv_heads = q.shape[1], segments[0].num_heads
    grouped = q.reshape(1, kv_heads, heads // kv_heads, q.shape[3])
    scores = [segment.scores(grouped, scale) for segment in segments]
    if sinks is not None:
        # A sink takes a share of the softmax and contributes nothing: a last column without a value.
        scores.append(sinks.astype(mx.float32).reshape(1, kv_heads, -1, 1))
    weights = softmax(mx.concatenate(scores, axis=-1))
    out, start = [], 0
    for segment in segments:
        end = start + segment.num_tokens
        out.append(segment.mix(weights[..., start:end]))
        start = end
    return sum(out[1:], out[0]).reshape(1, heads, 1, -1).astype(q.dtype)
