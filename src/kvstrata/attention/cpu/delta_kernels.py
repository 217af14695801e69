# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""The loop of the gated delta rule, compiled by numba at the first call and cached on disk.

The rows of a head's state are independent. An item takes some rows through all tokens, so that the rows stay in the
fastest cache.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kvstrata.codecs.cpu.vectors import LANES, load, load_one, multiply_add, splat, store, store_totals, zeros

# As in attention/cpu/kernels.py.
BUILT_ON = "f19bf38882182d97"

# Rows of an item, if v_dim is a multiple of this number; otherwise 4.
ROWS = 32


@njit(inline="always")
def _four_rows(state, row, dim, q, k, key, g, gate, has_gates, v, value, share, sums, out):
    """Update four rows by one token. Four rows hide the latency of additions and read the token's key once."""
    row_1, row_2, row_3 = row + dim, row + 2 * dim, row + 3 * dim
    for_all = splat(load_one(g, gate))
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    for i in range(0, dim, LANES):
        kept = load(g, gate + i) if has_gates else for_all
        by = multiply_add(load(k, key + i), kept, zeros())
        a = multiply_add(load(state, row + i), by, a)
        b = multiply_add(load(state, row_1 + i), by, b)
        c = multiply_add(load(state, row_2 + i), by, c)
        d = multiply_add(load(state, row_3 + i), by, d)
    store_totals(sums, 0, a, b, c, d)
    delta = splat((load_one(v, value) - load_one(sums, 0)) * share)
    delta_1 = splat((load_one(v, value + 1) - load_one(sums, 1)) * share)
    delta_2 = splat((load_one(v, value + 2) - load_one(sums, 2)) * share)
    delta_3 = splat((load_one(v, value + 3) - load_one(sums, 3)) * share)
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    for i in range(0, dim, LANES):
        kept = load(g, gate + i) if has_gates else for_all
        by, read = load(k, key + i), load(q, key + i)
        a = multiply_add(_renewed(state, row + i, kept, delta, by), read, a)
        b = multiply_add(_renewed(state, row_1 + i, kept, delta_1, by), read, b)
        c = multiply_add(_renewed(state, row_2 + i, kept, delta_2, by), read, c)
        d = multiply_add(_renewed(state, row_3 + i, kept, delta_3, by), read, d)
    store_totals(out, value, a, b, c, d)


@njit(inline="always")
def _renewed(state, place, kept, delta, by):
    new = multiply_add(load(state, place), kept, multiply_add(delta, by, zeros()))
    store(state, place, new)
    return new


@njit(nogil=True, cache=True, parallel=True, error_model="numpy")
def update(q, k, v, g, beta, before, state, out):
    """Compute the rule for q, k [rows, tokens, k_heads, k_dim], v, out [rows, tokens, heads, v_dim],
    g [rows, tokens, heads, 1 or k_dim], beta [rows, tokens, heads]; `before` [rows, heads, v_dim, k_dim] becomes
    `state`. k_dim is a multiple of 16, v_dim of 4."""
    batch, tokens, k_heads, dim = q.shape
    heads, width, num_gates = v.shape[2], v.shape[3], g.shape[3]
    group = heads // k_heads
    num_rows = ROWS if width % ROWS == 0 else 4
    pieces = width // num_rows
    for item in prange(batch * heads * pieces):
        sums = np.empty(4, np.float32)
        b, h, first = item // (heads * pieces), item // pieces % heads, item % pieces * num_rows
        begin = ((b * heads + h) * width + first) * dim
        for i in range(begin, begin + num_rows * dim, LANES):
            store(state, i, load(before, i))
        for t in range(tokens):
            at = (b * tokens + t) * heads + h
            key = ((b * tokens + t) * k_heads + h // group) * dim
            share = load_one(beta, at)
            for row in range(first, first + num_rows, 4):
                place = ((b * heads + h) * width + row) * dim
                _four_rows(
                    state,
                    place,
                    dim,
                    q,
                    k,
                    key,
                    g,
                    at * num_gates,
                    num_gates > 1,
                    v,
                    at * width + row,
                    share,
                    sums,
                    out,
                )
