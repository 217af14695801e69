# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""Loops over whole arrays, compiled by numba at the first call and cached on disk.

Arrays have one leading axis (layers and heads); see blocks.py for the layout of planes.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, prange, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from kvstrata.codecs.cpu.blocks import (
    BLOCK,
    CHUNK,
    GROUP,
    add_rotated_back,
    from_codes,
    mix_block,
    rotate_mean,
    score_block,
    stages_of,
    step_of,
    to_codes,
    unpack_block,
)
from kvstrata.codecs.cpu.vectors import (
    LANES,
    add,
    encode_64,
    encode_128,
    larger,
    largest,
    load,
    load_one,
    store,
    store_one,
    to_half,
    zeros,
)

# Numba caches compiled code by the text of this file alone. The digest of the inlined modules makes a change in them a
# change in this file; a test says what the digest has to be.
BUILT_ON = "f19bf38882182d97"


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def decode_planes(top, following, low, scales, centres, signs, block, bits, out):
    """Decode to out [rows, tokens, dim]; `centres`: means, each token's mean run, offset of the first token, angles."""
    means, mean_run, offset, angles = centres
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
            rotate_mean(means[row, mean_run[t]], (offset + t) % GROUP, angles, centre)
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
    """q [rows, queries, dim], rotated (Hadamard), in the order of codes -> out [rows, queries, tokens]"""
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
    """p [rows, queries, tokens] -> partial [rows, chunks, queries, dim], in the order of codes, zero before the call"""
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


_to_half = njit(to_half, inline="always")

_LARGEST_BITS = np.uint32(np.float32(65504).view(np.uint32))


@intrinsic
def _floats_at(_context, _address):
    """int64 -> a pointer to float32"""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), code


@njit(error_model="numpy")
def _round_mean(sums, tokens):
    """Divide sums in place to the mean, rounded to float16."""
    for d in range(len(sums)):
        value = sums[d] / np.float32(tokens)
        sums[d] = _to_half(value) if value >= 0 else -_to_half(-value)


@njit(error_model="numpy")
def _mean(x, at, tokens, mean):
    """Write mean [dim], rounded to float16, and return the largest magnitude."""
    dim = len(mean)
    most = zeros()
    for d in range(0, dim, LANES):
        sums = zeros()
        for t in range(tokens):
            values = load(x, at + t * dim + d)
            sums = add(sums, values)
            most = larger(most, values)
        store(mean, d, sums)
    _round_mean(mean, tokens)
    return largest(most)


@njit(error_model="numpy")
def _encode_64(x, at, tokens, mean, signs, top, following, low, scales, vector):
    """Encode vectors from `at` on to vectors of the planes from `vector` on."""
    for t in range(vector, vector + tokens):
        store_one(scales, t, encode_64(x, at, mean, signs, top, following, low, t * 16))
        at += 64


@njit(error_model="numpy")
def _encode_128(x, at, tokens, mean, signs, top, following, low, scales, vector):
    for t in range(vector, vector + tokens):
        store_one(scales, t, encode_128(x, at, mean, signs, top, following, low, t * 32))
        at += 128


@njit
def _largest_of(y, dim):
    most = zeros()
    for d in range(0, dim, LANES):
        most = larger(most, load(y, d))
    return largest(most)


@njit(fastmath=True, error_model="numpy")
def _encode_plain(x, at, tokens, mean, signs, block, top, following, low, scales, vector):
    """Encode vectors as `_encode_64` does, for every dim."""
    dim = len(mean)
    blocks, width = dim // block, dim // 4
    pairs, odd = stages_of(block)
    y, other = np.empty(dim, np.float32), np.empty(dim, np.float32)
    codes = np.empty(dim, np.uint8)
    for t in range(tokens):
        for b in range(blocks):
            for k in range(block):
                d = b * block + k
                y[k * blocks + b] = (load_one(x, at + t * dim + d) - mean[d]) * signs[d]
        to_codes(y, other, pairs, odd)
        scale = _to_half(_largest_of(y, dim))
        store_one(scales, vector + t, scale)
        factor = np.float32(128) / scale if scale > 0 else np.float32(0)
        for d in range(dim):
            codes[d] = np.int32(min(max(y[d] * factor + np.float32(128), np.float32(0)), np.float32(255)))
        _pack(codes, (vector + t) * width, top, following, low)


@njit
def _pack(codes, at, top, following, low):
    width = len(codes) // 4
    for j in range(width):
        a, b, c, d = codes[j], codes[width + j], codes[2 * width + j], codes[3 * width + j]
        store_one(top, at + j, np.uint8((a >> 6) | ((b >> 6) << 2) | ((c >> 6) << 4) | (d & 192)))
        store_one(following, at + j, np.uint8(((a >> 4) & 3) | ((b >> 2) & 12) | (c & 48) | ((d & 48) << 2)))
        store_one(low, at + j, np.uint16((a & 15) | ((b & 15) << 4) | ((c & 15) << 8) | ((d & 15) << 12)))


@njit(fastmath=True, error_model="numpy")
def _rope_aware_mean(x, at, tokens, offset, angles, mean):
    """Write the mean of vectors rotated back (RoPE) to the start of their group, and return the largest magnitude."""
    dim = len(mean)
    mean[:] = 0
    most = zeros()
    for t in range(tokens):
        add_rotated_back(x, at + t * dim, offset + t, angles, mean)
        for d in range(0, dim, LANES):
            most = larger(most, load(x, at + t * dim + d))
    _round_mean(mean, tokens)
    return largest(most)


@njit(fastmath=True, error_model="numpy")
def _centred(x, at, tokens, offset, angles, mean):
    """Return vectors less the mean rotated (RoPE) to their place, [tokens * dim]."""
    dim = len(mean)
    out, centre = np.empty(tokens * dim, np.float32), np.empty(dim, np.float32)
    for t in range(tokens):
        rotate_mean(mean, offset + t, angles, centre)
        for d in range(dim):
            out[t * dim + d] = load_one(x, at + t * dim + d) - centre[d]
    return out


@njit(error_model="numpy")
def _encode_vectors(x, at, tokens, mean, signs, block, out, vector):
    top, following, low, scales = out
    if len(mean) == 64:
        _encode_64(x, at, tokens, mean, signs, top, following, low, scales, vector)
    elif len(mean) == 128:
        _encode_128(x, at, tokens, mean, signs, top, following, low, scales, vector)
    else:
        _encode_plain(x, at, tokens, mean, signs, block, top, following, low, scales, vector)


@njit(error_model="numpy")
def _encode_mean_run(piece, x, where, has_means, means, angles, signs, block, out):
    """Encode a mean run. Return whether every value that moved a mean was finite and within float16's range."""
    _, stride, position, bounds = where
    num_mean_runs, dim = means.shape[1:]
    row, mean_run = piece // num_mean_runs, piece % num_mean_runs
    first, count = bounds[mean_run], bounds[mean_run + 1] - bounds[mean_run]
    at, vector, mean = row * stride + first * dim, row * bounds[num_mean_runs] + first, means[row, mean_run]
    is_rotated, offset, most = angles[0].shape[1] > 0, (position + first) % GROUP, np.float32(0)
    if not has_means:
        most = _rope_aware_mean(x, at, count, offset, angles, mean) if is_rotated else _mean(x, at, count, mean)
    if is_rotated:
        centred = _centred(x, at, count, offset, angles, mean)
        _encode_vectors(centred, 0, count, np.zeros(dim, np.float32), signs, block, out, vector)
    else:
        _encode_vectors(x, at, count, mean, signs, block, out, vector)
    return np.float32(most).view(np.uint32) <= _LARGEST_BITS


@njit
def _values_at(where, means):
    address, stride, _, bounds = where
    rows, num_mean_runs, dim = means.shape
    return carray(_floats_at(address), ((rows - 1) * stride + bounds[num_mean_runs] * dim,))


@njit(nogil=True, cache=True, parallel=True, error_model="numpy")
def encode_planes(where, has_means, means, angles, signs, block, out):
    """Encode vectors to the planes top, next, low and scales of `out`, and to means [rows, mean runs, dim] unless
    `has_means`.

    `where`: address of float32 [rows, tokens, dim], values from a row to the next, position of the first token, and
    bounds [mean runs + 1], the first tokens of the mean runs. `angles`: see blocks.py. Return whether every value that
    moved a mean was finite and within float16's range: if not, the result must not be used.
    """
    x, scaled_signs = _values_at(where, means), signs * np.float32(1 / np.sqrt(block))
    is_plain = np.empty(means.shape[0] * means.shape[1], np.bool_)
    for piece in prange(len(is_plain)):
        is_plain[piece] = _encode_mean_run(piece, x, where, has_means, means, angles, scaled_signs, block, out)
    return is_plain.all()
