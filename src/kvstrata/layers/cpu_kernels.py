"""The loops, compiled by numba when first called and kept on disk after that. float32 in, float32 out."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

_LOG2_E = np.float32(1.4426950408889634)
# Below this 2**x is no normal number; a weight of 1e-38 is none.
_SMALLEST = np.float32(-126.0)
# 2**f on [0, 1), a least-squares polynomial; relative error below 1e-6 in float32.
_C0 = np.float32(9.9999994e-1)
_C1 = np.float32(6.9315308e-1)
_C2 = np.float32(2.4015361e-1)
_C3 = np.float32(5.5826318e-2)
_C4 = np.float32(8.9893397e-3)
_C5 = np.float32(1.8775767e-3)


@njit(inline="always", fastmath=True)
def _exp(x):
    """e**x for x <= 0, without a branch or a call, so that the loops around it become vector instructions."""
    t = max(x * _LOG2_E, _SMALLEST)
    whole = np.floor(t)
    f = t - whole
    power = ((((_C5 * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _C0
    bits = (np.int32(whole) + np.int32(127)) << np.int32(23)
    return power * np.int32(bits).view(np.float32)


@njit(fastmath=True, nogil=True, cache=True, error_model="numpy")
def score(q, k, tokens, scale, scores, at):
    """q [heads, dim] by the first tokens of k [1, kv_heads, size, dim] -> scores [heads, at : at + tokens]"""
    kv_heads, dim = k.shape[1], k.shape[3]
    group = q.shape[0] // kv_heads
    scale = np.float32(scale)
    for r in range(q.shape[0]):
        keys = k[0, r // group]
        for j in range(tokens):
            total = np.float32(0)
            for d in range(dim):
                total += q[r, d] * keys[j, d]
            scores[r, at + j] = total * scale


@njit(fastmath=True, nogil=True, cache=True, error_model="numpy")
def softmax(scores, sinks):
    """In place, each row. A sink, where there is one for the row, takes its share and leaves no column."""
    heads, tokens = scores.shape
    for r in range(heads):
        row = scores[r]
        largest = row[0]
        for j in range(tokens):
            largest = max(largest, row[j])
        if len(sinks):
            largest = max(largest, sinks[r])
        total = _exp(sinks[r] - largest) if len(sinks) else np.float32(0)
        for j in range(tokens):
            weight = _exp(row[j] - largest)
            row[j] = weight
            total += weight
        inverse = np.float32(1) / total
        for j in range(tokens):
            row[j] *= inverse


@njit(fastmath=True, nogil=True, cache=True, error_model="numpy")
def mix(weights, at, v, tokens, out):
    """out [heads, dim] += weights [heads, at : at + tokens] by the first tokens of v [1, kv_heads, size, dim]"""
    kv_heads, dim = v.shape[1], v.shape[3]
    group = weights.shape[0] // kv_heads
    for r in range(weights.shape[0]):
        values = v[0, r // group]
        for j in range(tokens):
            weight = weights[r, at + j]
            for d in range(dim):
                out[r, d] += weight * values[j, d]


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def softmax_causal(scores, past, tokens):
    """In place: row i belongs to query i % tokens, which sees the first past + i % tokens + 1 columns."""
    num_rows, columns = scores.shape
    for i in prange(num_rows):
        row = scores[i]
        seen = min(columns, past + i % tokens + 1)
        largest = row[0]
        for j in range(seen):
            largest = max(largest, row[j])
        total = np.float32(0)
        for j in range(seen):
            weight = _exp(row[j] - largest)
            row[j] = weight
            total += weight
        inverse = np.float32(1) / total
        for j in range(seen):
            row[j] *= inverse
        for j in range(seen, columns):
            row[j] = np.float32(0)
