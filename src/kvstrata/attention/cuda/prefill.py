"""Attention of a chunk on CUDA whose shape is new: by plain products, because MLX's own would first be planned.

MLX hands attention to cuDNN, which takes 62 ms on an H200 to plan for each pair of lengths, where the whole pass of a
small model takes 11. Turns of a chat have new lengths each time. So a pair of lengths goes to cuDNN only when it came
often: what comes again earns its plan, and the rest never waits for one.

Knows queries, keys and values as plain arrays; does not know parts.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache

import mlx.core as mx

Shape = tuple[int, ...]

# Scores in one product, as float32: 32 MiB.
TILE_ENTRIES = 1 << 23

# Scores in all: beyond, the products take longer than a plan.
MOST_ENTRIES = 1 << 26

# Calls with one shape before it is left to cuDNN: a model makes one for each layer, so that is after some passes.
CALLS_BEFORE_PLAN = 128

# Shapes that are remembered; MLX keeps about as many plans.
MOST_SHAPES = 64


class Met:
    """How often shapes were met, of the latest ones."""

    def __init__(self, most: int = MOST_SHAPES) -> None:
        self._most = most
        self._times: OrderedDict[Shape, int] = OrderedDict()

    def count(self, shape: Shape) -> int:
        """Times, with this one."""
        self._times[shape] = self._times.get(shape, 0) + 1
        self._times.move_to_end(shape)
        if len(self._times) > self._most:
            self._times.popitem(last=False)
        return self._times[shape]


_met = Met()


def takes(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None, sinks: mx.array | None) -> bool:
    """Whether `attend` is the way for a chunk of one row in one layer."""
    is_known = mask.dtype == mx.bool_ if isinstance(mask, mx.array) else mask in (None, "causal")
    entries = q.shape[1] * q.shape[2] * k.shape[2]
    if not is_known or sinks is not None or not q.dtype == k.dtype == v.dtype or entries > MOST_ENTRIES:
        return False
    return _met.count((*q.shape, *k.shape, v.shape[3])) <= CALLS_BEFORE_PLAN


def attend(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | str | None) -> mx.array:
    """q [1, heads, tokens, k_dim] over k and v [1, kv_heads, total, dim], in float32 -> as q. See `takes`."""
    heads, tokens, total = q.shape[1], q.shape[2], k.shape[2]
    size = max(1, TILE_ENTRIES // (heads * total))
    if isinstance(mask, str):
        mask = _causal(tokens, total)
    keys, values = k.astype(mx.float32).swapaxes(-1, -2), v.astype(mx.float32)
    out = []
    for start in range(0, tokens, size):
        part = q[:, :, start : start + size]
        seen = None if mask is None else mask[..., start : start + size, :]
        out.append(_tile(part, keys, values, scale, seen))
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=2)


def _tile(q: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    (_, heads, tokens, dim), kv_heads = q.shape, keys.shape[1]
    # Queries that share a head of keys are one matrix: nothing is repeated for them.
    rows = (q.astype(mx.float32) * scale).reshape(1, kv_heads, heads // kv_heads * tokens, dim)
    scores = (rows @ keys).reshape(1, heads, tokens, -1)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1).reshape(1, kv_heads, heads // kv_heads * tokens, -1)
    return (weights @ values).reshape(1, heads, tokens, -1).astype(q.dtype)


@lru_cache(maxsize=2)
def _causal(tokens: int, total: int) -> mx.array:
    """Of the last tokens: the newest sees all of them."""
    return mx.arange(total - tokens, total)[:, None] >= mx.arange(total)
