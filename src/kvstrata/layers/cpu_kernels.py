"""The loops, compiled by numba when first called and kept on disk after that. float32 in, float32 out.

A run is a row of int64: batch row, address of K, address of V, size of the buffer in tokens, where the new token goes
(-1: nowhere), number of tokens. Whoever builds it keeps the buffers alive. Runs of a batch row follow each other.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, prange, types
from numba.extending import intrinsic

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


@intrinsic
def _pointer(_context, _address):
    """int64 -> float32*"""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), code


@njit(inline="always", fastmath=True)
def _exp(x):
    """e**x for x <= 0, without a branch or a call, so that the loops around it become vector instructions."""
    t = max(x * _LOG2_E, _SMALLEST)
    whole = np.floor(t)
    f = t - whole
    power = ((((_C5 * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _C0
    bits = (np.int32(whole) + np.int32(127)) << np.int32(23)
    return power * np.int32(bits).view(np.float32)


@njit(nogil=True, cache=True)
def write(k, v, runs):
    """k, v [rows, kv_heads, 1, dim]: the new tokens, each to where its run says."""
    kv_heads, k_dim, v_dim = k.shape[1], k.shape[3], v.shape[3]
    for i in range(runs.shape[0]):
        row, size, at = runs[i, 0], runs[i, 3], runs[i, 4]
        if at >= 0:
            k_buffer = carray(_pointer(runs[i, 1]), (kv_heads, size, k_dim))
            v_buffer = carray(_pointer(runs[i, 2]), (kv_heads, size, v_dim))
            for h in range(kv_heads):
                k_buffer[h, at] = k[row, h, 0]
                v_buffer[h, at] = v[row, h, 0]


@njit(inline="always", fastmath=True, error_model="numpy")
def _softmax(scores, sink, has_sink):
    """In place. A sink takes its share and leaves no column."""
    largest = scores[0]
    for j in range(len(scores)):
        largest = max(largest, scores[j])
    if has_sink:
        largest = max(largest, sink)
    total = _exp(sink - largest) if has_sink else np.float32(0)
    for j in range(len(scores)):
        weight = _exp(scores[j] - largest)
        scores[j] = weight
        total += weight
    inverse = np.float32(1) / total
    for j in range(len(scores)):
        scores[j] *= inverse


@njit(inline="always", fastmath=True, error_model="numpy")
def _query(q, kv_heads, r, first, last, runs, scale, sinks, out):
    """Query head r, q [heads, dim], of the batch row whose runs are [first, last); out [heads, v_dim] is zero."""
    h = r // (q.shape[0] // kv_heads)
    scores = np.empty(runs[first:last, 5].sum(), np.float32)
    at = 0
    for i in range(first, last):
        keys = carray(_pointer(runs[i, 1]), (h + 1, runs[i, 3], q.shape[1]))[h]
        for j in range(runs[i, 5]):
            total = np.float32(0)
            for d in range(q.shape[1]):
                total += q[r, d] * keys[j, d]
            scores[at + j] = total * scale
        at += runs[i, 5]
    _softmax(scores, sinks[r] if len(sinks) else np.float32(0), len(sinks) > 0)
    at = 0
    for i in range(first, last):
        values = carray(_pointer(runs[i, 2]), (h + 1, runs[i, 3], out.shape[1]))[h]
        for j in range(runs[i, 5]):
            weight = scores[at + j]
            for d in range(out.shape[1]):
                out[r, d] += weight * values[j, d]
        at += runs[i, 5]


@njit(inline="always")
def _runs_of(row, runs):
    first = 0
    while runs[first, 0] != row:
        first += 1
    last = first
    while last < runs.shape[0] and runs[last, 0] == row:
        last += 1
    return first, last


@njit(fastmath=True, nogil=True, cache=True, error_model="numpy")
def decode(q, kv_heads, runs, scale, sinks, out):
    """q [rows, heads, 1, k_dim] -> out [rows, heads, 1, v_dim], zero before"""
    for row in range(q.shape[0]):
        first, last = _runs_of(row, runs)
        for r in range(q.shape[1]):
            _query(
                q[row].reshape(q.shape[1], q.shape[3]),
                kv_heads,
                r,
                first,
                last,
                runs,
                np.float32(scale),
                sinks,
                out[row].reshape(q.shape[1], out.shape[3]),
            )


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def decode_parallel(q, kv_heads, runs, scale, sinks, out):
    heads = q.shape[1]
    for i in prange(q.shape[0] * heads):
        row, r = i // heads, i % heads
        first, last = _runs_of(row, runs)
        _query(
            q[row].reshape(q.shape[1], q.shape[3]),
            kv_heads,
            r,
            first,
            last,
            runs,
            np.float32(scale),
            sinks,
            out[row].reshape(q.shape[1], out.shape[3]),
        )


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def softmax_causal(scores, past, tokens):
    """In place: row i belongs to query i % tokens, which sees the first past + i % tokens + 1 columns."""
    num_rows, columns = scores.shape
    for i in prange(num_rows):
        seen = min(columns, past + i % tokens + 1)
        _softmax(scores[i, :seen], np.float32(0), False)
        for j in range(seen, columns):
            scores[i, j] = np.float32(0)
