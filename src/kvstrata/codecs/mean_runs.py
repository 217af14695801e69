"""Mean runs: tokens that share a mean, in groups of 256 that are aligned to the position in the sequence.

A piece of a group keeps the group's mean, and pieces that were encoded apart keep their means when they are joined: a
cut or a join encodes nothing anew. The position does not determine the mean runs then, so `MeanRuns` lists the number
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


def ids(mean_runs: MeanRuns) -> np.ndarray:
    """int32 [tokens]: each token's mean run."""
    return np.repeat(np.arange(len(mean_runs), dtype=np.int32), mean_runs)


def means_of(x: mx.array, mean_runs: MeanRuns) -> mx.array:
    """float32 [..., tokens, dim] -> [..., mean runs, dim]"""
    first, end = mean_runs[0], sum(mean_runs)
    whole = (end - first) // GROUP_TOKENS * GROUP_TOKENS
    means = [mx.mean(x[..., :first, :], axis=-2, keepdims=True)]
    if whole:
        groups = x[..., first : first + whole, :].reshape(*x.shape[:-2], -1, GROUP_TOKENS, x.shape[-1])
        means.append(mx.mean(groups, axis=-2))
    if first + whole < end:
        means.append(mx.mean(x[..., first + whole :, :], axis=-2, keepdims=True))
    return mx.concatenate(means, axis=-2)


def spread(by_run: mx.array, mean_runs: MeanRuns, axis: int) -> mx.array:
    """Expand one entry for each mean run to one for each token."""
    if len(mean_runs) == 1:
        return by_run  # broadcasts
    if not _is_regular(mean_runs):
        return mx.take(by_run, _run_of_token(mean_runs), axis=axis)
    start = GROUP_TOKENS - mean_runs[0]
    groups = mx.repeat(by_run, GROUP_TOKENS, axis=axis)
    return mx.split(groups, [start, start + sum(mean_runs)], axis=axis)[1]


def sums(p: mx.array, mean_runs: MeanRuns) -> mx.array:
    """[..., tokens] -> [..., mean runs]"""
    if len(mean_runs) == 1:
        return mx.sum(p, axis=-1, keepdims=True)
    if _is_regular(mean_runs):
        head, groups, tail = mx.split(p, [mean_runs[0], sum(mean_runs[:-1])], axis=-1)
        first, last = (mx.sum(end, axis=-1, keepdims=True) for end in (head, tail))
        whole = [mx.sum(mx.unflatten(groups, -1, (-1, GROUP_TOKENS)), axis=-1)] if len(mean_runs) > 2 else []
        return mx.concatenate([first, *whole, last], axis=-1)
    padded = mx.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, 1)])
    return mx.sum(mx.take(padded, _tokens_of_run(mean_runs), axis=-1), axis=-1)


def _is_regular(mean_runs: MeanRuns) -> bool:
    """Whether nothing was joined inside a group since encoding. No table is needed then."""
    return all(size == GROUP_TOKENS for size in mean_runs[1:-1])


# Every layer uses the same tables at every step.
@lru_cache(maxsize=MAX_TABLES)
def _run_of_token(mean_runs: MeanRuns) -> mx.array:
    return mx.array(ids(mean_runs))


@lru_cache(maxsize=MAX_TABLES)
def _tokens_of_run(mean_runs: MeanRuns) -> mx.array:
    """int32 [mean runs, most tokens]: short rows are filled with the number of tokens, where `sums` appends a zero."""
    starts, sizes = np.cumsum((0, *mean_runs[:-1])), np.array(mean_runs)
    offsets = np.arange(sizes.max())
    table = np.where(offsets < sizes[:, None], starts[:, None] + offsets, sizes.sum())
    return mx.array(table.astype(np.int32))


def cut_runs(mean_runs: MeanRuns, start: int, end: int) -> tuple[MeanRuns, int, int]:
    """Return the mean runs that tokens [start, end) keep, and the range [first, last) of these among all."""
    bounds = np.cumsum((0, *mean_runs)).tolist()
    kept = [(i, min(bounds[i + 1], end) - max(bounds[i], start)) for i in range(len(mean_runs))]
    kept = [(i, num_tokens) for i, num_tokens in kept if num_tokens > 0]
    return tuple(num_tokens for _, num_tokens in kept), kept[0][0], kept[-1][0] + 1
