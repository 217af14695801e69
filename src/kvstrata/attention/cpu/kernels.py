# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""Attention loops in float32, compiled by numba at the first call and cached on disk.

A run is a row of int64: the batch row, then the fields of `TokenRun` (step.py). The builder of the table keeps the
memory of its addresses alive. Runs of a batch row are consecutive.

Decoding cuts runs into pieces. Each piece is within one mean run of K and one of V, so it has a single mean of each. An
item is a piece in one KV head: its scores, weights and weighted sum are computed at once for all queries of the head,
relative to the item's largest score. Then the items of each query are combined. The order of additions depends only on
the runs of the row, not on threads or other rows.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import carray, njit, prange, types
from numba.extending import intrinsic

from kvstrata.codecs.cpu.blocks import (
    BLOCK,
    CHUNK,
    GROUP,
    mix_block,
    rotate,
    rotate_back,
    rotated_shares,
    score_block,
    step_of,
    unpack_block,
)
from kvstrata.codecs.cpu.vectors import LANES, exp

# Numba's cache is keyed by the text of this file alone. This digest of the modules that are inlined here makes a change
# of them a change of this file; a test checks the digest.
BUILT_ON = "f19bf38882182d97"

RAW_BITS = 32

# Fields of a run. Fields of K's planes and then of V's planes follow, each in the order below.
ROW, K, V, SIZE, WRITE_AT, NUM_TOKENS, START, K_PLANES, V_PLANES = 0, 1, 2, 3, 4, 5, 6, 7, 20

BITS, NEXT, LOW, SCALES, MEANS, ENDS, NUM_MEAN_RUNS = 0, 1, 2, 3, 4, 5, 6

COLUMNS, OFFSET, FIRST_DIM, PAIRS, STEP, GAP = 7, 8, 9, 10, 11, 12

# Fields of a piece.
RUN, FIRST, COUNT, K_MEAN_RUN, V_MEAN_RUN = 0, 1, 2, 3, 4

# float16 bits that are read as float32 are too small by this factor.
_HALF_RANGE = np.float32(2.0**112)

# Compiling takes most of the first start. Therefore a loop that only other loops call has no entry from Python, and
# integers that differ between calls are passed as np.int64, since numba compiles a function for each literal.
_inner = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@intrinsic
def _pointer(_context, _address, kind):
    """Cast an int64 to a pointer to `kind`."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(types.int64, kind), code


@njit(inline="always")
def _from_half(bits):
    """Convert the bits of a float16 to float32, subnormal numbers too."""
    magnitude = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * _HALF_RANGE
    return -magnitude if bits & np.uint16(0x8000) else magnitude


@njit(nogil=True, cache=True)
def write(k, v, runs):
    """Write the new tokens k, v [rows, kv_heads, 1, dim] to the slots that their runs name."""
    kv_heads, k_dim, v_dim = k.shape[1], k.shape[3], v.shape[3]
    for i in range(runs.shape[0]):
        row, size, at = runs[i, ROW], runs[i, SIZE], runs[i, WRITE_AT]
        if at >= 0:
            k_buffer = carray(_pointer(runs[i, K], np.float32), (kv_heads, size, k_dim))
            v_buffer = carray(_pointer(runs[i, V], np.float32), (kv_heads, size, v_dim))
            # Value by value: for an assignment of rows numba would compile checks of shapes, for seconds.
            for h in range(kv_heads):
                for d in range(k_dim):
                    k_buffer[h, at, d] = k[row, h, 0, d]
                for d in range(v_dim):
                    v_buffer[h, at, d] = v[row, h, 0, d]


@_inner
def _end_of(run, planes, mean_run):
    """Return the first token after a mean run."""
    if run[planes + BITS] == RAW_BITS:
        return run[SIZE]
    return carray(_pointer(run[planes + ENDS], np.int64), (mean_run + 1,))[mean_run]


@_inner
def _cut(runs, pieces):
    """Write pieces [capacity, fields] up to their capacity, and return the number of pieces that the runs have."""
    num_pieces, k_planes, v_planes = 0, np.int64(K_PLANES), np.int64(V_PLANES)
    for i in range(runs.shape[0]):
        run = runs[i]
        at, end, k_mean_run, v_mean_run = run[START], run[START] + run[NUM_TOKENS], np.int64(0), np.int64(0)
        while at < end:
            while _end_of(run, k_planes, k_mean_run) <= at:
                k_mean_run += 1
            while _end_of(run, v_planes, v_mean_run) <= at:
                v_mean_run += 1
            mean_runs_end = min(_end_of(run, k_planes, k_mean_run), _end_of(run, v_planes, v_mean_run))
            stop = min(min(end, at + CHUNK), mean_runs_end)
            if num_pieces < len(pieces):
                pieces[num_pieces, RUN], pieces[num_pieces, FIRST], pieces[num_pieces, COUNT] = i, at, stop - at
                pieces[num_pieces, K_MEAN_RUN], pieces[num_pieces, V_MEAN_RUN] = k_mean_run, v_mean_run
            num_pieces += 1
            at = stop
    return num_pieces


@_inner
def _pieces_of(runs):
    pieces = np.empty((_cut(runs, np.empty((0, 5), np.int64)), 5), np.int64)
    _cut(runs, pieces)
    return pieces


@_inner
def _bounds_of(rows, runs, pieces):
    """Return bounds [rows + 1]: row i has the pieces from bounds[i] to bounds[i + 1]."""
    bounds = np.zeros(rows + 1, np.int64)
    for i in range(len(pieces)):
        bounds[runs[pieces[i, RUN], ROW] + 1] += 1
    return np.cumsum(bounds)


@_inner(fastmath=True)
def _queries(q, runs, scale, signs, block):
    """Scale q [rows, heads, 1, dim], and also rotate (Hadamard) if some keys are -> both [rows, heads, dim]."""
    rows, heads, _, dim = q.shape
    scaled = np.empty((rows, heads, dim), np.float32)
    some = (runs[:, K_PLANES + BITS] != RAW_BITS).any()
    rotated = np.empty((rows if some else 0, heads, dim), np.float32)
    other = np.empty(dim, np.float32)
    for row in range(rows):
        for r in range(heads):
            for d in range(dim):
                scaled[row, r, d] = q[row, r, 0, d] * scale
            if some:
                rotate(scaled[row, r], signs, block, rotated[row, r], other)
    return scaled, rotated


@_inner
def _planes_of(run, first, planes, vectors, width):
    """Return planes `top`, `next` and `low` as flat arrays, empty if the codec has none, and scales."""
    bits = run[planes + BITS]
    top = carray(_pointer(run[first], np.uint8), (vectors * width,))
    following = carray(_pointer(run[planes + NEXT], np.uint8), (vectors * width if bits > 2 else 0,))
    low = carray(_pointer(run[planes + LOW], np.uint16), (vectors * width if bits > 4 else 0,))
    return top, following, low, carray(_pointer(run[planes + SCALES], np.uint16), (vectors,))


@_inner
def _mean_of(run, planes, h, mean_run, dim):
    return carray(_pointer(run[planes + MEANS], np.uint16), (h + 1, run[planes + NUM_MEAN_RUNS], dim))[h, mean_run]


@_inner(fastmath=True)
def _shares(queries, mean, run, piece):
    """Return the share of the keys' mean in the scores, [queries, tokens of the piece and some more]. The mean may be
    RoPE-aware: see codecs/rope.py."""
    dim, pairs = queries.shape[1], run[K_PLANES + PAIRS]
    start, step, gap = run[K_PLANES + FIRST_DIM], run[K_PLANES + STEP], run[K_PLANES + GAP]
    num_tokens = (piece[COUNT] + LANES - 1) // LANES * LANES
    factors, shares = np.empty(queries.shape, np.float32), np.empty((len(queries), num_tokens), np.float32)
    for r in range(len(queries)):
        for d in range(dim):
            factors[r, d] = queries[r, d] * _from_half(mean[d])
        for i in range(pairs):
            a, b = start + i * step, start + i * step + gap
            crossed = queries[r, b] * _from_half(mean[a]) - queries[r, a] * _from_half(mean[b])
            factors[r, a] += factors[r, b]
            factors[r, b] = crossed
    if not pairs:
        for r in range(len(queries)):
            shares[r, :] = factors[r].sum()
        return shares
    columns = carray(_pointer(run[K_PLANES + COLUMNS], np.float32), (dim * GROUP + LANES,))
    rotated_shares(factors, columns, (run[K_PLANES + OFFSET] + piece[FIRST]) % GROUP, shares)
    return shares


@_inner(fastmath=True, error_model="numpy")
def _score(scaled, rotated, run, piece, h, codes, scores):
    """Write scores [queries of head h, tokens of the piece]."""
    queries, count = scores.shape
    row, dim, first = run[ROW], scaled.shape[2], h * run[SIZE] + piece[FIRST]
    q_at, bits = (row * scaled.shape[1] + h * queries) * dim, run[K_PLANES + BITS]
    if bits == RAW_BITS:
        keys = carray(_pointer(run[K], np.float32), ((h + 1) * run[SIZE] * dim,))
        for t in range(0, count, BLOCK):
            score_block(scaled, q_at, keys, (first + t) * dim, min(BLOCK, count - t), dim, scores, t)
        return
    top, following, low, scales = _planes_of(run, np.int64(K), np.int64(K_PLANES), (h + 1) * run[SIZE], dim // 4)
    for t in range(0, count, BLOCK):
        num_tokens = min(BLOCK, count - t)
        unpack_block(top, following, low, first + t, num_tokens, dim // 4, bits, codes)
        score_block(rotated, q_at, codes, np.int64(0), num_tokens, dim, scores, t)
    mean, step = _mean_of(run, np.int64(K_PLANES), h, piece[K_MEAN_RUN], dim), step_of(bits)
    shares = _shares(scaled[row, h * queries : (h + 1) * queries], mean, run, piece)
    for r in range(queries):
        for t in range(count):
            scores[r, t] = scores[r, t] * (_from_half(scales[first + t]) * step) + shares[r, t]


@_inner(fastmath=True, error_model="numpy")
def _weigh(scores, largest, totals):
    """Convert scores to weights relative to the largest score of each query, not divided by their total yet."""
    for r in range(scores.shape[0]):
        top = scores[r, 0]
        for t in range(scores.shape[1]):
            top = max(top, scores[r, t])
        total = np.float32(0)
        for t in range(scores.shape[1]):
            weight = exp(scores[r, t] - top)
            scores[r, t] = weight
            total += weight
        largest[r], totals[r] = top, total


@_inner(fastmath=True, error_model="numpy")
def _mix(weights, run, piece, h, codes, sums):
    """Add weights [queries, tokens] @ values to sums [queries, dim]; of planes without the mean, Hadamard-rotated."""
    count, dim, first, bits = weights.shape[1], sums.shape[1], h * run[SIZE] + piece[FIRST], run[V_PLANES + BITS]
    if bits == RAW_BITS:
        values = carray(_pointer(run[V], np.float32), ((h + 1) * run[SIZE] * dim,))
        for t in range(0, count, BLOCK):
            mix_block(weights, t, values, (first + t) * dim, min(BLOCK, count - t), dim, sums, 0)
        return
    top, following, low, scales = _planes_of(run, np.int64(V), np.int64(V_PLANES), (h + 1) * run[SIZE], dim // 4)
    step = step_of(bits)
    for r in range(weights.shape[0]):
        for t in range(count):
            weights[r, t] *= _from_half(scales[first + t]) * step
    for t in range(0, count, BLOCK):
        num_tokens = min(BLOCK, count - t)
        unpack_block(top, following, low, first + t, num_tokens, dim // 4, bits, codes)
        mix_block(weights, t, codes, np.int64(0), num_tokens, dim, sums, 0)


@_inner
def _item(scaled, rotated, runs, piece, h, largest, totals, sums):
    """Compute an item -> largest, totals [queries of head h], sums [queries, v_dim], zero before"""
    run = runs[piece[RUN]]
    scores = np.empty((sums.shape[0], piece[COUNT]), np.float32)
    is_raw = run[K_PLANES + BITS] == RAW_BITS and run[V_PLANES + BITS] == RAW_BITS
    codes = np.empty(0 if is_raw else BLOCK * max(scaled.shape[2], sums.shape[1]), np.float32)
    _score(scaled, rotated, run, piece, h, codes, scores)
    _weigh(scores, largest, totals)
    _mix(scores, run, piece, h, codes, sums)


@_inner(fastmath=True, error_model="numpy")
def _put_together(runs, found, h, r, sinks, signs, block, rotated, other, out):
    """Combine what the pieces of a row gave for query r of head h -> out [v_dim], zero before

    `rotated` and `other` [v_dim] are scratch.
    """
    pieces, largest, totals, sums = found
    dim, sink, top = len(out), h * totals.shape[2] + r, largest[0, h, r]
    for i in range(len(pieces)):
        top = max(top, largest[i, h, r])
    total = np.float32(0)
    if len(sinks):
        top = max(top, sinks[sink])
        total = exp(sinks[sink] - top)
    rotated[:] = 0
    some = False
    for i in range(len(pieces)):
        run, share = runs[pieces[i, RUN]], exp(largest[i, h, r] - top)
        weight = share * totals[i, h, r]
        total += weight
        if run[V_PLANES + BITS] == RAW_BITS:
            for d in range(dim):
                out[d] += share * sums[i, h, r, d]
        else:
            some, mean = True, _mean_of(run, np.int64(V_PLANES), h, pieces[i, V_MEAN_RUN], dim)
            for d in range(dim):
                out[d] += weight * _from_half(mean[d])
                rotated[d] += share * sums[i, h, r, d]
    if some:
        rotate_back(rotated, signs, block, out, other)
    for d in range(dim):
        out[d] /= total


@_inner
def _found(pieces, kv_heads, queries, dim):
    """Allocate the results of all items: largest, totals, sums."""
    largest, totals = np.empty((2, len(pieces), kv_heads, queries), np.float32)
    return largest, totals, np.zeros((len(pieces), kv_heads, queries, dim), np.float32)


@_inner
def _put_all_together(runs, pieces, largest, totals, sums, sinks, signs, block, out):
    bounds = _bounds_of(out.shape[0], runs, pieces)
    rotated, other = np.empty(out.shape[3], np.float32), np.empty(out.shape[3], np.float32)
    for row in range(out.shape[0]):
        a, b = bounds[row], bounds[row + 1]
        found = pieces[a:b], largest[a:b], totals[a:b], sums[a:b]
        for i in range(out.shape[1]):
            h, r = i // totals.shape[2], i % totals.shape[2]
            _put_together(runs, found, h, r, sinks, signs, block, rotated, other, out[row, i, 0])


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def decode(q, kv_heads, runs, scale, sinks, k_signs, k_block, v_signs, v_block, out):
    """Attend with q [rows, heads, 1, k_dim] -> out [rows, heads, 1, v_dim], zero before

    Only the items run in parallel: a second parallel loop would wait for the slowest thread twice and save 1 %.
    """
    scaled, rotated = _queries(q, runs, np.float32(scale), k_signs, k_block)
    pieces = _pieces_of(runs)
    largest, totals, sums = _found(pieces, kv_heads, q.shape[1] // kv_heads, out.shape[3])
    for i in prange(len(pieces) * kv_heads):
        p, h = i // kv_heads, i % kv_heads
        _item(scaled, rotated, runs, pieces[p], h, largest[p, h], totals[p, h], sums[p, h])
    _put_all_together(runs, pieces, largest, totals, sums, sinks, v_signs, v_block, out)


@njit(inline="always", fastmath=True, error_model="numpy")
def _softmax(scores, sink, has_sink):
    """Compute the softmax in place. A sink takes its share and has no column."""
    largest = scores[0]
    for j in range(len(scores)):
        largest = max(largest, scores[j])
    if has_sink:
        largest = max(largest, sink)
    total = exp(sink - largest) if has_sink else np.float32(0)
    for j in range(len(scores)):
        weight = exp(scores[j] - largest)
        scores[j] = weight
        total += weight
    inverse = np.float32(1) / total
    for j in range(len(scores)):
        scores[j] *= inverse


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def softmax_causal(scores, past, tokens):
    """Compute in place. Row i belongs to query i % tokens, which sees the first past + i % tokens + 1 columns."""
    num_rows, columns = scores.shape
    for i in prange(num_rows):
        seen = min(columns, past + i % tokens + 1)
        _softmax(scores[i, :seen], np.float32(0), False)
        for j in range(seen, columns):
            scores[i, j] = np.float32(0)
