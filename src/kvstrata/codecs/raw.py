"""The codec of raw values, and exact products of 16-bit arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.codecs.base import (
    FLOATS,
    EncodedArray,
    Extent,
    Plane,
    UnsupportedCodec,
    check_input,
    check_queries,
    copy_rows,
    join_plain,
    own,
)


@dataclass(frozen=True)
class RawCodec:
    @property
    def name(self) -> str:
        return "raw"

    @property
    def rotation(self) -> None:
        return None

    def spec(self) -> dict[str, Any]:
        return {"codec": "raw", "version": 1}

    def check(self, dim: int) -> None:
        if dim < 1:
            raise UnsupportedCodec(f"raw stores vectors of at least one value, not {dim}.")

    def layout(self, extent: Extent) -> dict[str, Plane]:
        return {"values": Plane(extent.num_tokens, extent.dim, FLOATS)}

    def bits_per_value(self, dim: int) -> float:  # noqa: ARG002
        """Return the bits of a 16-bit checkpoint."""
        return 16.0

    def encode(self, x: mx.array, position: int = 0) -> EncodedArray:
        """Copy `x`: most often it is a range of a buffer that will be freed."""
        check_input(self, x, position)
        return own(self, {"values": copy_rows(x, 0, x.shape[-2])}, x, position)

    def adopt(self, values: mx.array, position: int = 0) -> EncodedArray:
        """Take the array without a copy: no other code may write it, and it must not be a slice of a larger one."""
        check_input(self, values, position)
        return own(self, {"values": values}, values, position)

    def decode(self, encoded: EncodedArray, dtype: mx.Dtype) -> mx.array:
        return encoded.arrays["values"].astype(dtype)

    def scores(self, q: mx.array, encoded: EncodedArray) -> mx.array:
        check_queries(q, encoded, encoded.dim)
        return exact_scores(q, encoded.arrays["values"])

    def mix(self, p: mx.array, encoded: EncodedArray) -> mx.array:
        check_queries(p, encoded, encoded.num_tokens)
        return exact_mix(p.astype(mx.float32), encoded.arrays["values"])

    def join(self, a: EncodedArray, b: EncodedArray) -> EncodedArray:
        return join_plain(a, b)


# Numbers of queries to try. Some back-ends round before they subtract, for one query or for any number: the difference
# is then lost.
TRIED_ROWS = (1, 2)

TRIED_TOKENS, TRIED_DIM = 96, 64

# Largest accepted error, as a share of the largest score. Sixteen bits alone are off by 4e-3 (bfloat16) and
# 5e-4 (float16).
WRONG_BY = 5e-5

REST_SCALE = 2048.0


def exact_scores(q: mx.array, k: mx.array, scale: float = 1.0) -> mx.array:
    """q [..., queries, dim], k [..., tokens, dim] -> float32 [..., queries, tokens], times `scale`"""
    keys, num_queries = k.swapaxes(-1, -2), q.shape[-2]
    is_narrow = q.dtype == k.dtype != mx.float32
    # A product with one token is a product with a vector, where Metal rounds before it subtracts.
    least = least_rows(k.dtype) if is_narrow and k.shape[-2] > 1 else None
    if least is None:
        return (q.astype(mx.float32) * scale) @ keys.astype(mx.float32)
    if num_queries < least:
        q = mx.broadcast_to(q, (*q.shape[:-2], least, q.shape[-1]))
    # Scaling by a power of two is exact, and keeps products within float16's range.
    power = 2.0 ** math.floor(math.log2(scale))
    found = _twice(q * power, keys)[..., :num_queries, :]
    return found if power == scale else found * (scale / power)


def exact_mix(weights: mx.array, v: mx.array) -> mx.array:
    """float32 weights [..., queries, tokens], v [..., tokens, dim] -> float32 [..., queries, dim]"""
    if v.dtype == mx.float32:
        return weights @ v
    near = weights.astype(v.dtype)
    # Scaled up, because the rest of a small weight is below the smallest number of float16.
    rest = ((weights - near) * REST_SCALE).astype(v.dtype)
    both = mx.concatenate([near, rest], axis=-2) @ v
    near, rest = mx.split(both.astype(mx.float32), 2, axis=-2)
    return near + rest / REST_SCALE


@cache
def least_rows(dtype: mx.Dtype) -> int | None:
    """Return the number of queries from which on a product is exact on this machine; None: it never is."""
    return next((rows for rows in TRIED_ROWS if _is_exact(dtype, rows)), None)


def _is_exact(dtype: mx.Dtype, rows: int) -> bool:
    """Whether a product is exact for keys that have much in common: their scores are large and close to each other."""
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
