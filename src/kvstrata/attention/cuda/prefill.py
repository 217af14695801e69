"""Attention of a chunk of a new shape on CUDA, by plain products, because cuDNN would first have to plan it.

MLX hands attention to cuDNN, which takes 62 ms on an H200 to plan each pair of lengths, while the whole pass of a small
model takes 11 ms. Messages of a chat have new lengths each time. Therefore a pair of lengths goes to cuDNN only after
many calls: a repeated pair earns its plan, and other pairs never wait for one.

Knows queries, keys and values as plain arrays; does not know segments.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache

import mlx.core as mx

Shape = tuple[int, ...]

# Most scores in one product, as float32: 32 MiB.
TILE_ENTRIES = 1 << 23

# Most scores of a chunk: with more, the products take longer than a plan.
MOST_ENTRIES = 1 << 26

# Calls with one shape before cuDNN takes it: each pass of a model makes one call for each layer.
CALLS_BEFORE_PLAN = 128

# Shapes that are remembered; MLX keeps about as many plans.
MOST_SHAPES = 64


class SeenLengths:
    """Counts of how often each of the latest shapes was met."""

    def __init__(self, most: int = MOST_SHAPES) -> None:
        self._most = most
        self._times: OrderedDict[Shape, int] = OrderedDict()

    def count(self, shape: Shape) -> int:
        """Count a shape, and return how often it was met, this time included."""
        self._times[shape] = self._times.get(shape, 0) + 1
        self._times.move_to_end(shape)
        if len(self._times) > self._most:
            self._times.popitem(last=False)
        return self._times[shape]


_met = SeenLengths()


def takes(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None, sinks: mx.array | None) -> bool:
    """Whether `attend` computes a chunk of one row in one layer. Counts the shape."""
    is_known = mask.dtype == mx.bool_ if isinstance(mask, mx.array) else mask in (None, "causal")
    entries = q.shape[1] * q.shape[2] * k.shape[2]
    if not is_known or sinks is not None or not q.dtype == k.dtype == v.dtype or entries > MOST_ENTRIES:
        return False
    return _met.count((*q.shape, *k.shape, v.shape[3])) <= CALLS_BEFORE_PLAN


def attend(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | str | None) -> mx.array:
    """Attend with q [1, heads, tokens, k_dim] over k, v [1, kv_heads, total, dim], in float32 -> as q. See `takes`."""
    heads, tokens, total = q.shape[1], q.shape[2], k.shape[2]
    size = max(1, TILE_ENTRIES // (heads * total))
    if isinstance(mask, str):
        mask = _causal(tokens, total)
    keys, values = k.astype(mx.float32).swapaxes(-1, -2), v.astype(mx.float32)
    out = []
    for start in range(0, tokens, size):
        tile = q[:, :, start : start + size]
        seen = None if mask is None else mask[..., start : start + size, :]
        out.append(_tile(tile, keys, values, scale, seen))
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=2)


def _tile(q: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    (_, heads, tokens, dim), kv_heads = q.shape, keys.shape[1]
    # Queries of a KV head form one matrix, so keys and values are not repeated.
    rows = (q.astype(mx.float32) * scale).reshape(1, kv_heads, heads // kv_heads * tokens, dim)
    scores = (rows @ keys).reshape(1, heads, tokens, -1)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1).reshape(1, kv_heads, heads // kv_heads * tokens, -1)
    return (weights @ values).reshape(1, heads, tokens, -1).astype(q.dtype)


@lru_cache(maxsize=2)
def _causal(tokens: int, total: int) -> mx.array:
    """Mask of the last `tokens` of `total`: the newest sees all of them."""
    return mx.arange(total - tokens, total)[:, None] >= mx.arange(total)
