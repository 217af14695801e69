"""Products with 16-bit keys and values that lose no more than rounding their result, without a float32 copy of them.

MLX adds up in float32 and rounds what it returns to the arrays' dtype: a score of 300 comes back as a multiple of 2 in
bfloat16. So the product is computed once more, less what came back: that difference is small, and rounding it costs
nothing. Weights are split into a 16-bit number and its rest, which ride through one product as two rows; the sum of
each part is rounded to 16 bits, as what attention returns is.
"""

from __future__ import annotations

import math
from functools import cache

import mlx.core as mx
import numpy as np

# Some back-ends round before they subtract, for one row or for any: then the difference is lost.
TRIED_ROWS = (1, 2)
TRIED_TOKENS, TRIED_DIM = 96, 64
# Of the largest score. Sixteen bits alone are at 4e-3 (bfloat16) and 5e-4 (float16).
WRONG_BY = 5e-5
REST_SCALE = 2048.0


def exact_scores(q: mx.array, k: mx.array, scale: float = 1.0) -> mx.array:
    """q [..., queries, dim], k [..., tokens, dim] -> float32 [..., queries, tokens], times `scale`"""
    keys, num_queries = k.swapaxes(-1, -2), q.shape[-2]
    is_narrow = q.dtype == k.dtype != mx.float32
    # A product with one token is one with a vector: there Metal rounds before it subtracts.
    least = least_rows(k.dtype) if is_narrow and k.shape[-2] > 1 else None
    if least is None:
        return (q.astype(mx.float32) * scale) @ keys.astype(mx.float32)
    if num_queries < least:
        q = mx.broadcast_to(q, (*q.shape[:-2], least, q.shape[-1]))
    # A power of two changes no digit of a query, and keeps products within float16.
    power = 2.0 ** math.floor(math.log2(scale))
    found = _twice(q * power, keys)[..., :num_queries, :]
    return found if power == scale else found * (scale / power)


def exact_mix(weights: mx.array, v: mx.array) -> mx.array:
    """float32 weights [..., queries, tokens], v [..., tokens, dim] -> float32 [..., queries, dim]"""
    if v.dtype == mx.float32:
        return weights @ v
    near = weights.astype(v.dtype)
    # Made larger, because the rest of a small weight is smaller than the smallest number that float16 has.
    rest = ((weights - near) * REST_SCALE).astype(v.dtype)
    both = mx.concatenate([near, rest], axis=-2) @ v
    near, rest = mx.split(both.astype(mx.float32), 2, axis=-2)
    return near + rest / REST_SCALE


@cache
def least_rows(dtype: mx.Dtype) -> int | None:
    """Queries that a product needs on this machine to lose nothing; None: it always does."""
    return next((rows for rows in TRIED_ROWS if _is_exact(dtype, rows)), None)


def _is_exact(dtype: mx.Dtype, rows: int) -> bool:
    """With keys that have much in common: scores that are large and near to each other."""
    rng = np.random.default_rng(0)
    q = mx.array(rng.standard_normal((2, rows, TRIED_DIM)) + 4).astype(dtype)
    k = mx.array(rng.standard_normal((2, TRIED_TOKENS, TRIED_DIM)) + 4).astype(dtype)
    wide_q, wide_k = (np.array(x.astype(mx.float32), np.float64) for x in (q, k))
    expected = wide_q @ wide_k.swapaxes(-1, -2)
    return bool(np.abs(np.array(_twice(q, k.swapaxes(-1, -2))) - expected).max() < WRONG_BY * expected.max())


def _twice(q: mx.array, keys: mx.array) -> mx.array:
    near = q @ keys
    excess = mx.addmm(near, q, keys, alpha=-1.0)
    return near.astype(mx.float32) - excess
