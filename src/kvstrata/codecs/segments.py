"""Which tokens share a mean: groups of 256, aligned to the position in the sequence.

A piece of a group keeps the group's mean, and pieces that were encoded apart keep theirs when joined, so a cut or a
join never encodes anew. Segments are therefore counted out (tokens under each mean), not derived from the position.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

GROUP_TOKENS = 256
MAX_TABLES = 16  # of a hundred thousand tokens each: 13 MB in all

Segments = tuple[int, ...]


def segments_of(position: int, num_tokens: int) -> Segments:
    first = min(num_tokens, GROUP_TOKENS - position % GROUP_TOKENS)
    whole, last = divmod(num_tokens - first, GROUP_TOKENS)
    return (first, *([GROUP_TOKENS] * whole), *([last] if last else []))


def ids(segments: Segments) -> np.ndarray:
    """int32 [tokens]: each token's segment."""
    return np.repeat(np.arange(len(segments), dtype=np.int32), segments)


def means_of(x: mx.array, segments: Segments) -> mx.array:
    """float32 [..., tokens, dim] -> [..., segments, dim]"""
    first, end = segments[0], sum(segments)
    whole = (end - first) // GROUP_TOKENS * GROUP_TOKENS
    means = [mx.mean(x[..., :first, :], axis=-2, keepdims=True)]
    if whole:
        groups = x[..., first : first + whole, :].reshape(*x.shape[:-2], -1, GROUP_TOKENS, x.shape[-1])
        means.append(mx.mean(groups, axis=-2))
    if first + whole < end:
        means.append(mx.mean(x[..., first + whole :, :], axis=-2, keepdims=True))
    return mx.concatenate(means, axis=-2)


def spread(by_segment: mx.array, segments: Segments, axis: int) -> mx.array:
    """One entry for each segment -> one for each token."""
    if len(segments) == 1:
        return by_segment  # broadcasts
    return mx.take(by_segment, _segment_of_token(segments), axis=axis)


def sums(p: mx.array, segments: Segments) -> mx.array:
    """[..., tokens] -> [..., segments]"""
    first, *middle, last = segments if len(segments) > 1 else (*segments, 0)
    if not any(size != GROUP_TOKENS for size in middle):
        # As it was encoded: read where it lies.
        head, groups, tail = mx.split(p, [first, sum(segments) - last], axis=-1)
        ends = [mx.sum(end, axis=-1, keepdims=True) for end in (head, tail)]
        whole = [mx.sum(mx.unflatten(groups, -1, (-1, GROUP_TOKENS)), axis=-1)] if middle else []
        return mx.concatenate([ends[0], *whole, *ends[1 : len(segments)]], axis=-1)
    padded = mx.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, 1)])
    return mx.sum(mx.take(padded, _tokens_of_segment(segments), axis=-1), axis=-1)


# Every layer asks for the same ones at every step.
@lru_cache(maxsize=MAX_TABLES)
def _segment_of_token(segments: Segments) -> mx.array:
    return mx.array(ids(segments))


@lru_cache(maxsize=MAX_TABLES)
def _tokens_of_segment(segments: Segments) -> mx.array:
    """int32 [segments, most tokens]: short rows go on with the number of tokens, where a sum is given a zero."""
    starts, sizes = np.cumsum((0, *segments[:-1])), np.array(segments)
    offsets = np.arange(sizes.max())
    table = np.where(offsets < sizes[:, None], starts[:, None] + offsets, sizes.sum())
    return mx.array(table.astype(np.int32))


def cut_segments(segments: Segments, start: int, end: int) -> tuple[Segments, int, int]:
    """What tokens [start, end) keep: their segments, and the range [first, last) of these among all."""
    bounds = np.cumsum((0, *segments)).tolist()
    kept = [(i, min(bounds[i + 1], end) - max(bounds[i], start)) for i in range(len(segments))]
    kept = [(i, num_tokens) for i, num_tokens in kept if num_tokens > 0]
    return tuple(num_tokens for _, num_tokens in kept), kept[0][0], kept[-1][0] + 1
