"""Mean runs: tokens that share a mean, in groups of 256 that are aligned to the position in the sequence.

A piece of a group keeps the group's mean, and pieces that were encoded apart keep their means when they are joined: a
cut or a join encodes nothing anew. The position does not determine the mean runs then, so `Segments` lists the number
of tokens under each mean.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

GROUP_TOKENS = 256

MAX_TABLES = 128  # of joined planes; with ten thousand tokens each they take 10 MB in all

MeanRuns = tuple[int, ...]


def runs_of(position: int, num_tokens: int) -> MeanRuns:
    first = min(num_tokens, GROUP_TOKENS - position % GROUP_TOKENS)
    whole, last = divmod(num_tokens - first, GROUP_TOKENS)
    return (first, *([GROUP_TOKENS] * whole), *([last] if last else []))


def ids(segments: MeanRuns) -> np.ndarray:
    """int32 [tokens]: each token's mean run."""
    return np.repeat(np.arange(len(segments), dtype=np.int32), segments)


def means_of(x: mx.array, segments: MeanRuns) -> mx.array:
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


def spread(by_segment: mx.array, segments: MeanRuns, axis: int) -> mx.array:
    """Expand one entry for each mean run to one for each token."""
    if len(segments) == 1:
        return by_segment  # broadcasts
    if not _is_regular(segments):
        return mx.take(by_segment, _segment_of_token(segments), axis=axis)
    start = GROUP_TOKENS - segments[0]
    groups = mx.repeat(by_segment, GROUP_TOKENS, axis=axis)
    return mx.split(groups, [start, start + sum(segments)], axis=axis)[1]


def sums(p: mx.array, segments: MeanRuns) -> mx.array:
    """[..., tokens] -> [..., segments]"""
    if len(segments) == 1:
        return mx.sum(p, axis=-1, keepdims=True)
    if _is_regular(segments):
        head, groups, tail = mx.split(p, [segments[0], sum(segments[:-1])], axis=-1)
        first, last = (mx.sum(end, axis=-1, keepdims=True) for end in (head, tail))
        whole = [mx.sum(mx.unflatten(groups, -1, (-1, GROUP_TOKENS)), axis=-1)] if len(segments) > 2 else []
        return mx.concatenate([first, *whole, last], axis=-1)
    padded = mx.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, 1)])
    return mx.sum(mx.take(padded, _tokens_of_segment(segments), axis=-1), axis=-1)


def _is_regular(segments: MeanRuns) -> bool:
    """Whether nothing was joined inside a group since encoding. No table is needed then."""
    return all(size == GROUP_TOKENS for size in segments[1:-1])


# Every layer uses the same tables at every step.
@lru_cache(maxsize=MAX_TABLES)
def _segment_of_token(segments: MeanRuns) -> mx.array:
    return mx.array(ids(segments))


@lru_cache(maxsize=MAX_TABLES)
def _tokens_of_segment(segments: MeanRuns) -> mx.array:
    """int32 [segments, most tokens]: short rows are filled with the number of tokens, where `sums` appends a zero."""
    starts, sizes = np.cumsum((0, *segments[:-1])), np.array(segments)
    offsets = np.arange(sizes.max())
    table = np.where(offsets < sizes[:, None], starts[:, None] + offsets, sizes.sum())
    return mx.array(table.astype(np.int32))


def cut_runs(segments: MeanRuns, start: int, end: int) -> tuple[MeanRuns, int, int]:
    """Return the mean runs that tokens [start, end) keep, and the range [first, last) of these among all."""
    bounds = np.cumsum((0, *segments)).tolist()
    kept = [(i, min(bounds[i + 1], end) - max(bounds[i], start)) for i in range(len(segments))]
    kept = [(i, num_tokens) for i, num_tokens in kept if num_tokens > 0]
    return tuple(num_tokens for _, num_tokens in kept), kept[0][0], kept[-1][0] + 1
