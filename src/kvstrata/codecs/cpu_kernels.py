# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""The loops, compiled by numba when first called and kept on disk after that.

A crumb plane is read as bytes and the nibble plane as 16-bit words, so that entry j holds dims 4j to 4j + 3 in all of
them. Unpacked, a vector lies as [4, dim / 4]: first the dims 0, 4, 8, ..., then 1, 5, 9, ... Every loop then runs over
memory without gaps and becomes vector instructions. Arrays have one leading axis (layers and heads).
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

CHUNK = 256  # tokens of one piece of parallel work

_ONE = np.float32(1)
_SMALLEST_NORMAL = np.float32(2.0**-14)  # of float16
_STEPS_DOWN = np.float32(2.0**24)  # float16's subnormal numbers are multiples of 2**-24
_LARGEST = np.float32(65504)


@njit(inline="always", fastmath=True)
def _level(code, middle):
    # Through 8 bits: numba computes on 64-bit integers, and the compiler then sees that it needs none of them.
    return np.float32(np.uint8(code)) - middle


@njit(fastmath=True, error_model="numpy")
def _unpack(top, following, low, row, t, bits, buffer):
    """Codes less their middle, as float32 [dim], in the order above; -> what a step is worth, in units of the scale.

    One store in each loop: with more the compiler gives up on proving that nothing overlaps.
    """
    width = top.shape[2]
    for i in range(4):
        crumb, nibble = 2 * i, 4 * i
        if bits == 8:
            for j in range(width):
                upper = (((top[row, t, j] >> crumb) & 3) << 2) | ((following[row, t, j] >> crumb) & 3)
                buffer[i * width + j] = _level((upper << 4) | ((low[row, t, j] >> nibble) & 15), np.float32(127.5))
        elif bits == 4:
            for j in range(width):
                upper = (((top[row, t, j] >> crumb) & 3) << 2) | ((following[row, t, j] >> crumb) & 3)
                buffer[i * width + j] = _level(upper, np.float32(7.5))
        else:
            for j in range(width):
                buffer[i * width + j] = _level((top[row, t, j] >> crumb) & 3, np.float32(1.5))
    return np.float32(1 / 128) if bits == 8 else np.float32(1 / 8) if bits == 4 else np.float32(1 / 2)


@njit(fastmath=True)
def _quads(source, target):
    """The butterflies of the Hadamard transform within four neighbours, on a vector in the order above."""
    width = len(source) // 4
    for half in range(0, len(source), 2 * width):
        for j in range(width):
            target[half + j] = source[half + j] + source[half + width + j]
            target[half + width + j] = source[half + j] - source[half + width + j]
    for j in range(2 * width):
        source[j] = target[j] + target[2 * width + j]
        source[2 * width + j] = target[j] - target[2 * width + j]


# The other butterflies are done as one long loop each. A stage that takes neighbours apart into two halves moves the
# lowest digit of the index to the top; a stage that weaves halves together moves it back. So the transform of a vector
# in the order above ends, after all its stages, in the natural one, and the other way round. These are calls: inlined
# by numba instead of by the compiler behind it, they count references to arrays, which takes longer than the work.


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
def _stages(block):
    """Those that `_quads` leaves, two by two: swapping the arrays instead would cost more than a stage."""
    stages = 0
    while 4 << stages < block:
        stages += 1
    return stages // 2, stages % 2 == 1


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def decode_planes(top, following, low, scales, means, segment, signs, block, bits, out):
    """-> out [rows, tokens, dim]"""
    rows, tokens, dim = out.shape
    chunks = (tokens + CHUNK - 1) // CHUNK
    blocks = dim // block
    shrink = np.float32(1 / np.sqrt(block))
    pairs, odd = _stages(block)
    for piece in prange(rows * chunks):
        row, first = piece // chunks, piece % chunks * CHUNK
        y, other = np.empty(dim, np.float32), np.empty(dim, np.float32)
        for t in range(first, min(first + CHUNK, tokens)):
            factor = _unpack(top, following, low, row, t, bits, y) * scales[row, t] * shrink
            _quads(y, other)
            for _ in range(pairs):
                _take_apart(y, other)
                _take_apart(other, y)
            if odd:
                _take_apart(y, other)
                for d in range(dim):
                    y[d] = other[d]
            centre = segment[t]
            if blocks == 1:
                for d in range(dim):
                    out[row, t, d] = y[d] * factor * signs[d] + means[row, centre, d]
            else:
                for b in range(blocks):
                    for k in range(block):
                        d = b * block + k
                        out[row, t, d] = y[k * blocks + b] * factor * signs[d] + means[row, centre, d]


@njit(inline="always")
def _to_half(a):
    """The nearest float16 number of a >= 0, kept as float32."""
    if a >= _LARGEST:
        return _LARGEST
    if a < _SMALLEST_NORMAL:
        return np.float32(np.rint(a * _STEPS_DOWN) / _STEPS_DOWN)
    bits = np.float32(a).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.uint32(rounded).view(np.float32)


@njit(inline="always", fastmath=True, error_model="numpy")
def _code(y, inverse):
    return np.int32(min(max((y * inverse + _ONE) * np.float32(128), np.float32(0)), np.float32(255)))


@njit
def _pack(codes, row, t, top, following, low):
    width = len(codes) // 4
    for j in range(width):
        a, b, c, d = codes[j], codes[width + j], codes[2 * width + j], codes[3 * width + j]
        top[row, t, j] = (a >> 6) | ((b >> 6) << 2) | ((c >> 6) << 4) | (d & 192)
    for j in range(width):
        a, b, c, d = codes[j], codes[width + j], codes[2 * width + j], codes[3 * width + j]
        following[row, t, j] = ((a >> 4) & 3) | ((b >> 2) & 12) | (c & 48) | ((d & 48) << 2)
    for j in range(width):
        a, b, c, d = codes[j], codes[width + j], codes[2 * width + j], codes[3 * width + j]
        low[row, t, j] = (a & 15) | ((b & 15) << 4) | ((c & 15) << 8) | ((d & 15) << 12)


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def encode_planes(x, means, segment, signs, block, top, following, low, scales):
    """x [rows, tokens, dim] -> the planes"""
    rows, tokens, dim = x.shape
    chunks = (tokens + CHUNK - 1) // CHUNK
    blocks = dim // block
    shrink = np.float32(1 / np.sqrt(block))
    pairs, odd = _stages(block)
    for piece in prange(rows * chunks):
        row, first = piece // chunks, piece % chunks * CHUNK
        y, other = np.empty(dim, np.float32), np.empty(dim, np.float32)
        codes = np.empty(dim, np.uint8)
        for t in range(first, min(first + CHUNK, tokens)):
            centre = segment[t]
            if blocks == 1:
                for d in range(dim):
                    y[d] = (x[row, t, d] - means[row, centre, d]) * signs[d] * shrink
            else:
                for b in range(blocks):
                    for k in range(block):
                        d = b * block + k
                        y[k * blocks + b] = (x[row, t, d] - means[row, centre, d]) * signs[d] * shrink
            for _ in range(pairs):
                _weave(y, other)
                _weave(other, y)
            if odd:
                _weave(y, other)
                for d in range(dim):
                    y[d] = other[d]
            _quads(y, other)
            largest = np.float32(0)
            for d in range(dim):
                largest = max(largest, abs(y[d]))
            scale = _to_half(largest)
            scales[row, t] = scale
            inverse = _ONE / scale if scale > 0 else np.float32(0)
            for d in range(dim):
                codes[d] = _code(y[d], inverse)
            _pack(codes, row, t, top, following, low)


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def score_planes(q, base, top, following, low, scales, segment, bits, out):
    """q [rows, queries, dim], rotated, in the order above;
    base [rows, queries, segments] -> out [rows, queries, tokens]
    """
    rows, queries, tokens = out.shape
    dim = q.shape[2]
    chunks = (tokens + CHUNK - 1) // CHUNK
    for piece in prange(rows * chunks):
        row, first = piece // chunks, piece % chunks * CHUNK
        codes = np.empty(dim, np.float32)
        for t in range(first, min(first + CHUNK, tokens)):
            factor = _unpack(top, following, low, row, t, bits, codes) * scales[row, t]
            for r in range(queries):
                total = np.float32(0)
                for d in range(dim):
                    total += q[row, r, d] * codes[d]
                out[row, r, t] = total * factor + base[row, r, segment[t]]


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def mix_planes(p, top, following, low, scales, bits, partial):
    """p [rows, queries, tokens]; partial [rows, chunks, queries, dim], in the order above, is zero before"""
    rows, queries, tokens = p.shape
    chunks, dim = partial.shape[1], partial.shape[3]
    for piece in prange(rows * chunks):
        row, chunk = piece // chunks, piece % chunks
        codes = np.empty(dim, np.float32)
        for t in range(chunk * CHUNK, min((chunk + 1) * CHUNK, tokens)):
            factor = _unpack(top, following, low, row, t, bits, codes) * scales[row, t]
            for r in range(queries):
                weight = p[row, r, t] * factor
                for d in range(dim):
                    partial[row, chunk, r, d] += weight * codes[d]


@njit(fastmath=True, nogil=True, cache=True, parallel=True, error_model="numpy")
def look_up(octets, norms, table, bits, out):
    """octets [vectors, bytes], a stream of bits; out [vectors, dim]"""
    vectors, dim = out.shape
    mask = (np.uint32(1) << np.uint32(bits)) - np.uint32(1)
    for v in prange(vectors):
        for group in range(dim // 8):
            word = np.uint32(0)
            for k in range(bits):
                word |= np.uint32(octets[v, group * bits + k]) << np.uint32(8 * k)
            for k in range(8):
                out[v, group * 8 + k] = table[(word >> np.uint32(k * bits)) & mask] * norms[v]
