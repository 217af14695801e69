# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""Building blocks of the loops here and in attention/cpu: unpack, rotate and multiply a few tokens. For numba only.

A crumb plane is read as bytes and the nibble plane as 16-bit words, so that entry j holds dims 4j to 4j + 3 in every
plane. An unpacked vector is [4, dim / 4]: first the dims 0, 4, 8, ..., then 1, 5, 9, ...; this is the order of codes.
Every loop then runs over memory without gaps.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kvstrata.codecs.cpu.vectors import (
    LANES,
    load,
    load_one,
    multiply_add,
    splat,
    store,
    store_one,
    store_totals,
    total,
    unpack_2,
    unpack_4,
    unpack_8,
    zeros,
)
from kvstrata.codecs.mean_runs import GROUP_TOKENS as GROUP

CHUNK = 256  # tokens of one piece of parallel work

BLOCK = 32  # tokens that are unpacked at once: their values stay in the L1 cache


@njit
def unpack_block(top, following, low, first, num_tokens, width, bits, target):
    """Unpack codes, less their middle, to float32 [num_tokens, 4 * width].

    All arrays are treated as flat: `first` counts tokens over the leading axes too. The last step of a token overlaps
    the step before where 16 does not divide the width.
    """
    if width < LANES:
        _unpack_few(top, following, low, first, num_tokens, width, bits, target)
        return
    for j in range(num_tokens):
        for step in range(0, width, LANES):
            entry = min(step, width - LANES)
            at, into = (first + j) * width + entry, j * 4 * width + entry
            if bits == 8:
                unpack_8(top, following, low, at, target, into, width)
            elif bits == 4:
                unpack_4(top, following, low, at, target, into, width)
            else:
                unpack_2(top, following, low, at, target, into, width)


@njit
def _unpack_few(top, following, low, first, num_tokens, width, bits, target):
    """Unpack codes of a dim below 64."""
    for j in range(num_tokens):
        for i in range(4 * width):
            at, shift = (first + j) * width + i % width, i // width * 2
            code = (load_one(top, at) >> shift) & 3
            if bits > 2:
                code = (code << 2) | ((load_one(following, at) >> shift) & 3)
            if bits > 4:
                code = (code << 4) | ((load_one(low, at) >> (2 * shift)) & 15)
            store_one(target, j * 4 * width + i, np.float32(code) - np.float32((1 << bits) - 1) / np.float32(2))


@njit(inline="always")
def step_of(bits):
    """The size of a code's step, in units of the scale."""
    return np.float32(1 / 128) if bits == 8 else np.float32(1 / 8) if bits == 4 else np.float32(1 / 2)


@njit(fastmath=True)
def _quads(source, target):
    """The butterflies of the Hadamard transform within four neighbours, on a vector in the order of codes."""
    width = len(source) // 4
    for half in range(0, len(source), 2 * width):
        for j in range(width):
            target[half + j] = source[half + j] + source[half + width + j]
            target[half + width + j] = source[half + j] - source[half + width + j]
    for j in range(2 * width):
        source[j] = target[j] + target[2 * width + j]
        source[2 * width + j] = target[j] - target[2 * width + j]


# Each other stage of butterflies is one long loop. A stage that takes neighbours apart into two halves moves the lowest
# digit of the index to the top; a stage that weaves halves together moves the digit back. After all stages a vector in
# the order of codes is therefore in the natural order, and the reverse. The stages are calls: inlined by numba instead
# of LLVM, they would count references to arrays, which takes longer than the work.


@njit(fastmath=True)
def _take_apart(source, target):
    middle = len(source) // 2
    for k in range(middle):
        target[k] = source[2 * k] + source[2 * k + 1]
        target[middle + k] = source[2 * k] - source[2 * k + 1]


@njit(fastmath=True)
def _weave(source, target):
    middle = len(source) // 2
    for k in range(middle):
        target[2 * k] = source[k] + source[middle + k]
        target[2 * k + 1] = source[k] - source[middle + k]


@njit(inline="always")
def stages_of(block):
    """Return the pairs of stages that `_quads` leaves, and whether a single one is left: swapping the arrays after one
    stage would cost more than a stage."""
    stages = 0
    while 4 << stages < block:
        stages += 1
    return stages // 2, stages % 2 == 1


@njit
def to_codes(y, other, pairs, odd):
    """Transform in place, from the natural order to the order of codes."""
    for _ in range(pairs):
        _weave(y, other)
        _weave(other, y)
    if odd:
        _weave(y, other)
        for d in range(len(y)):
            y[d] = other[d]
    _quads(y, other)


@njit
def from_codes(y, other, pairs, odd):
    _quads(y, other)
    for _ in range(pairs):
        _take_apart(y, other)
        _take_apart(other, y)
    if odd:
        _take_apart(y, other)
        for d in range(len(y)):
            y[d] = other[d]


@njit(fastmath=True)
def rotate(x, signs, block, y, other):
    """Rotate (Hadamard) x [dim] to y [dim], in the order of codes; `other` is scratch."""
    blocks, shrink = len(x) // block, np.float32(1 / np.sqrt(block))
    for d in range(len(x)):
        y[d % block * blocks + d // block] = x[d] * signs[d] * shrink
    to_codes(y, other, *stages_of(block))


@njit(fastmath=True)
def rotate_back(y, signs, block, out, other):
    """Add the reverse rotation of y to out [dim]; y is overwritten."""
    blocks, shrink = len(out) // block, np.float32(1 / np.sqrt(block))
    from_codes(y, other, *stages_of(block))
    for d in range(len(out)):
        out[d] += y[d % block * blocks + d // block] * signs[d] * shrink


# RoPE-aware means: see rope.py. `angles` are cos and sin [GROUP, pairs], the first rotated dim, the distance from a
# pair to the next and from the first dim of a pair to its second; without pairs there is no rotation.


@njit(fastmath=True)
def rotate_mean(mean, offset, angles, out):
    """Rotate (RoPE) a mean to an offset into its group -> out [dim]."""
    cos, sin, first, step, gap = angles
    for d in range(len(out)):
        out[d] = mean[d]
    for i in range(cos.shape[1]):
        a = first + i * step
        x, y = mean[a], mean[a + gap]
        out[a] = x * cos[offset, i] - y * sin[offset, i]
        out[a + gap] = x * sin[offset, i] + y * cos[offset, i]


@njit(fastmath=True)
def add_rotated_back(x, at, offset, angles, sums):
    """sums [dim] += x[at : at + dim], rotated back (RoPE) to the start of its group"""
    cos, sin, first, step, gap = angles
    for d in range(first):
        sums[d] += load_one(x, at + d)
    for d in range(first + 2 * cos.shape[1], len(sums)):
        sums[d] += load_one(x, at + d)
    for i in range(cos.shape[1]):
        a = first + i * step
        u, v = load_one(x, at + a), load_one(x, at + a + gap)
        sums[a] += u * cos[offset, i] + v * sin[offset, i]
        sums[a + gap] += v * cos[offset, i] - u * sin[offset, i]


@njit(fastmath=True)
def rotated_shares(factors, columns, offset, shares):
    """shares [queries, tokens] = factors [queries, dim] @ columns [dim, ...] from `offset` on, a multiple of 16 tokens.

    Rows of `columns` are GROUP wide, and 16 numbers follow the last.
    """
    num_queries, dim = factors.shape
    row = 0
    while row + 3 <= num_queries:
        for t in range(0, shares.shape[1], LANES):
            a, b, c = zeros(), zeros(), zeros()
            for d in range(dim):
                x = load(columns, d * GROUP + offset + t)
                a = multiply_add(splat(factors[row, d]), x, a)
                b = multiply_add(splat(factors[row + 1, d]), x, b)
                c = multiply_add(splat(factors[row + 2, d]), x, c)
            store(shares, row * shares.shape[1] + t, a)
            store(shares, (row + 1) * shares.shape[1] + t, b)
            store(shares, (row + 2) * shares.shape[1] + t, c)
        row += 3
    while row < num_queries:
        other = min(row + 1, num_queries - 1)
        for t in range(0, shares.shape[1], LANES):
            a, b = zeros(), zeros()
            for d in range(dim):
                x = load(columns, d * GROUP + offset + t)
                a = multiply_add(splat(factors[row, d]), x, a)
                b = multiply_add(splat(factors[other, d]), x, b)
            store(shares, row * shares.shape[1] + t, a)
            store(shares, other * shares.shape[1] + t, b)
        row += 2


# Products over a block of tokens that fits the L1 cache, for all queries at once. All arrays but `scores` and `weights`
# are treated as flat: query r starts at q_at + r * dim, token j at k_at + j * dim.


@njit(fastmath=True)
def score_block(queries, q_at, keys, k_at, num_tokens, dim, scores, at):
    """scores[r, at + j] = query r . key j"""
    whole = dim - dim % LANES
    fours = num_tokens - num_tokens % 4
    for first in range(0, fours, 4):
        k = k_at + first * dim
        for r in range(scores.shape[0]):
            q = q_at + r * dim
            a, b, c, e = zeros(), zeros(), zeros(), zeros()
            for d in range(0, whole, LANES):
                x = load(queries, q + d)
                a = multiply_add(x, load(keys, k + d), a)
                b = multiply_add(x, load(keys, k + dim + d), b)
                c = multiply_add(x, load(keys, k + 2 * dim + d), c)
                e = multiply_add(x, load(keys, k + 3 * dim + d), e)
            store_totals(scores, r * scores.shape[1] + at + first, a, b, c, e)
    for j in range(fours, num_tokens):
        for r in range(scores.shape[0]):
            a = zeros()
            for d in range(0, whole, LANES):
                a = multiply_add(load(queries, q_at + r * dim + d), load(keys, k_at + j * dim + d), a)
            scores[r, at + j] = total(a)
    if whole < dim:
        _score_rest(queries, q_at, keys, k_at, num_tokens, dim, scores, at)


@njit(fastmath=True)
def _score_rest(queries, q_at, keys, k_at, num_tokens, dim, scores, at):
    """Add the products of the dims that 16 lanes leave of each vector."""
    for j in range(num_tokens):
        for r in range(scores.shape[0]):
            for d in range(dim - dim % LANES, dim):
                scores[r, at + j] += load_one(queries, q_at + r * dim + d) * load_one(keys, k_at + j * dim + d)


@njit(fastmath=True)
def mix_block(weights, at, values, v_at, num_tokens, dim, sums, s_at):
    """sums[s_at + r * dim ...] += weights[r, at + j] * value j"""
    whole = dim - dim % LANES
    fours = num_tokens - num_tokens % 4
    # Four tokens after four, so that memory is read in order.
    for first in range(0, fours, 4):
        v, w = v_at + first * dim, at + first
        for r in range(weights.shape[0]):
            a, b = splat(weights[r, w]), splat(weights[r, w + 1])
            c, e = splat(weights[r, w + 2]), splat(weights[r, w + 3])
            for d in range(0, whole, LANES):
                x = load(sums, s_at + r * dim + d)
                x = multiply_add(a, load(values, v + d), x)
                x = multiply_add(b, load(values, v + dim + d), x)
                x = multiply_add(c, load(values, v + 2 * dim + d), x)
                x = multiply_add(e, load(values, v + 3 * dim + d), x)
                store(sums, s_at + r * dim + d, x)
    for j in range(fours, num_tokens):
        for r in range(weights.shape[0]):
            weight = splat(weights[r, at + j])
            for d in range(0, whole, LANES):
                x = multiply_add(weight, load(values, v_at + j * dim + d), load(sums, s_at + r * dim + d))
                store(sums, s_at + r * dim + d, x)
    if whole < dim:
        _mix_rest(weights, at, values, v_at, num_tokens, dim, sums, s_at)


@njit(fastmath=True)
def _mix_rest(weights, at, values, v_at, num_tokens, dim, sums, s_at):
    for r in range(weights.shape[0]):
        for d in range(dim - dim % LANES, dim):
            added = load_one(sums, s_at + r * dim + d)
            for j in range(num_tokens):
                added += weights[r, at + j] * load_one(values, v_at + j * dim + d)
            store_one(sums, s_at + r * dim + d, added)
