"""Decode row by row, on every machine: by MLX's operations, on CUDA by the kernels of cuda/ranges.py if they fit."""

from __future__ import annotations

import mlx.core as mx

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda.ranges import attend as attend_ranges
from kvstrata.attention.cuda.ranges import fit_together
from kvstrata.attention.segments import RawSegment, Segment, SegmentedKV
from kvstrata.codecs import backends


def decode_row_by_row(queries: mx.array, keys: SegmentedKV, scale: float, sinks: mx.array | None) -> mx.array:
    """Attend with one query for each row over all parts of the row."""
    rows = mx.split(queries, len(keys.rows)) if len(keys.rows) > 1 else [queries]
    out = [_decode_row(q, parts, scale, sinks) for q, parts in zip(rows, keys.rows, strict=True)]
    return mx.concatenate(out) if len(out) > 1 else out[0]


def _decode_row(q: mx.array, parts: tuple[Segment, ...], scale: float, sinks: mx.array | None) -> mx.array:
    only = parts[0] if len(parts) == 1 else None
    if isinstance(only, RawSegment):
        return mx.fast.scaled_dot_product_attention(q, only.k, only.v, scale=scale, sinks=sinks)
    if backends.active() == "cuda":
        ranges = [part.cuda_range() for part in parts]
        if fit_together(ranges):
            return attend_ranges(q, ranges, scale, sinks)
    return decode_over_segments(q, parts, scale, sinks)


def decode_over_segments(q: mx.array, parts: tuple[Segment, ...], scale: float, sinks: mx.array | None) -> mx.array:
    """Compute scores of each part, one softmax over all, and the sum of the parts' weighted sums, in float32 whatever
    the model's dtype. Only scores are concatenated."""
    heads, kv_heads = q.shape[1], parts[0].num_heads
    grouped = q.reshape(1, kv_heads, heads // kv_heads, q.shape[3])
    scores = [part.scores(grouped, scale) for part in parts]
    if sinks is not None:
        # A sink takes a share of the softmax and contributes nothing: a last column without a value.
        scores.append(sinks.astype(mx.float32).reshape(1, kv_heads, -1, 1))
    weights = cpu_step.softmax(mx.concatenate(scores, axis=-1))
    out, start = [], 0
    for part in parts:
        end = start + part.num_tokens
        out.append(part.mix(weights[..., start:end]))
        start = end
    return sum(out[1:], out[0]).reshape(1, heads, 1, -1).astype(q.dtype)
