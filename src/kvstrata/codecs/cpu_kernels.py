# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""The loops over whole arrays, compiled by numba when first called and kept on disk after that.

Arrays have one leading axis (layers and heads); see cpu_blocks.py for how planes lie.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kvstrata.codecs.cpu_blocks import (
    BLOCK,
    CHUNK,
    GROUP,
    from_codes,
    mix_block,
    score_block,
    stages_of,
    step_of,
    turn_mean,
    unpack_block,
)

# Numba keeps what it compiled by the text of this file alone. This names the text of the modules that it is made of, so
# that a change there is one here; a test says what it has to be.
BUILT_ON = "7f80627c2d92e9eb"


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def decode_planes(top, following, low, scales, centres, signs, block, bits, out):
    """-> out [rows, tokens, dim]; `centres`: means, each token's segment, the offset of the first token, angles"""
    means, segment, offset, angles = centres
    rows, tokens, dim = out.shape
    chunks = (tokens + CHUNK - 1) // CHUNK
    blocks, width = dim // block, dim // 4
    step = step_of(bits) * np.float32(1 / np.sqrt(block))
    pairs, odd = stages_of(block)
    for piece in prange(rows * chunks):
        row, first = piece // chunks, piece % chunks * CHUNK
        y, other = np.empty(dim, np.float32), np.empty(dim, np.float32)
        centre = np.empty(dim, np.float32)
        for t in range(first, min(first + CHUNK, tokens)):
            unpack_block(top, following, low, row * tokens + t, 1, width, bits, y)
            from_codes(y, other, pairs, odd)
            factor = step * scales[row, t]
            turn_mean(means[row, segment[t]], (offset + t) % GROUP, angles, centre)
            if blocks == 1:
                for d in range(dim):
                    out[row, t, d] = y[d] * factor * signs[d] + centre[d]
            else:
                for b in range(blocks):
                    for k in range(block):
                        d = b * block + k
                        out[row, t, d] = y[k * blocks + b] * factor * signs[d] + centre[d]


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def score_planes(q, top, following, low, scales, bits, out):
    """q [rows, queries, dim], rotated, in the order above -> out [rows, queries, tokens]"""
    rows, queries, tokens = out.shape
    dim = q.shape[2]
    width, step = dim // 4, step_of(bits)
    chunks = (tokens + CHUNK - 1) // CHUNK
    for piece in prange(rows * chunks):
        row, first = piece // chunks, piece % chunks * CHUNK
        end = min(first + CHUNK, tokens)
        codes = np.empty(BLOCK * dim, np.float32)
        for t in range(first, end, BLOCK):
            num_tokens = min(BLOCK, end - t)
            unpack_block(top, following, low, row * tokens + t, num_tokens, width, bits, codes)
            score_block(q, row * queries * dim, codes, 0, num_tokens, dim, out[row], t)
        for r in range(queries):
            for t in range(first, end):
                out[row, r, t] *= step * scales[row, t]


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def mix_planes(p, top, following, low, scales, bits, partial):
    """p [rows, queries, tokens]; partial [rows, chunks, queries, dim], in the order above, is zero before"""
    rows, queries, tokens = p.shape
    chunks, dim = partial.shape[1], partial.shape[3]
    width, step = dim // 4, step_of(bits)
    for piece in prange(rows * chunks):
        row, chunk = piece // chunks, piece % chunks
        first, end = chunk * CHUNK, min((chunk + 1) * CHUNK, tokens)
        codes, weights = np.empty(BLOCK * dim, np.float32), np.empty((queries, CHUNK), np.float32)
        for r in range(queries):
            for t in range(first, end):
                weights[r, t - first] = p[row, r, t] * (step * scales[row, t])
        for t in range(first, end, BLOCK):
            num_tokens = min(BLOCK, end - t)
            unpack_block(top, following, low, row * tokens + t, num_tokens, width, bits, codes)
            mix_block(weights, t - first, codes, 0, num_tokens, dim, partial, piece * queries * dim)
