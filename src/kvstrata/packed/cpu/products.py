# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""Products with packed weights, compiled by numba at the first call and cached on disk.

tiles.py describes the layout of weights. A panel is a row of tiles: 8 rows of the matrix. One panel, or as many as one
instruction takes, is unpacked once and then multiplied by every vector of activations. The order of additions depends
neither on the number of threads nor on the number of vectors.

A weight is a tuple, `PackedWeight.fields`: codes, scales (with biases; both arrays are bytes), bits of a code, kind of
scales, base of levels, tiles in a group, tiles in a panel, number of panels, number of rows.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit, prange

from kvstrata.packed.cpu.tiles import (
    FP4,
    NUM_INTERLEAVED,
    TILE_FACTORS,
    TILE_VALUES,
    dequantize_tile,
    dot8_1,
    dot8_4,
    dot8_codes_4,
    dot8_codes_8,
    dot8_last,
    dot16_1,
    dot16_4,
    dot16_codes_4,
    dot16_codes_8,
    dot16_last,
    dot_exact,
    factors_bfloat,
    factors_exponent,
    factors_float,
    factors_half,
    quantize_8,
    quantize_16,
    unpack_2,
    unpack_3,
    unpack_4,
    unpack_5,
    unpack_6,
    unpack_8,
    unpack_fp4,
)
from kvstrata.packed.quantized import TILE_COLUMNS, TILE_ROWS

# As in attention/cpu/kernels.py.
BUILT_ON = "e37b9e328679bfa4"

TASK_PANELS = 12  # that a thread takes at a time

VECTOR_LEVELS = 4 * TILE_ROWS  # in one vector of a tile

HALF, BFLOAT, FLOAT, EXPONENT = 0, 1, 2, 3  # how scales and biases are stored

# As in attention/cpu/kernels.py: no entry from Python.
_inner = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_inner
def _unpack(codes, bits, panel, num_tiles, levels, place, interleaved):
    """Unpack a panel -> levels, as number `place` of `interleaved` panels side by side"""
    step = TILE_VALUES // 8 * (4 if bits == FP4 else bits)
    at, into = panel * num_tiles * step, place * VECTOR_LEVELS
    size, stride = interleaved * TILE_VALUES, interleaved * VECTOR_LEVELS
    # A loop for each number of bits: a branch for each tile takes as long as the tile.
    if bits == 4:
        for tile in range(num_tiles):
            unpack_4(codes, at + tile * step, levels, into + tile * size, stride)
    elif bits == 8:
        for tile in range(num_tiles):
            unpack_8(codes, at + tile * step, levels, into + tile * size, stride)
    elif bits == 6:
        for tile in range(num_tiles):
            unpack_6(codes, at + tile * step, levels, into + tile * size, stride)
    elif bits == 5:
        for tile in range(num_tiles):
            unpack_5(codes, at + tile * step, levels, into + tile * size, stride)
    elif bits == 3:
        for tile in range(num_tiles):
            unpack_3(codes, at + tile * step, levels, into + tile * size, stride)
    elif bits == 2:
        for tile in range(num_tiles):
            unpack_2(codes, at + tile * step, levels, into + tile * size, stride)
    else:
        for tile in range(num_tiles):
            unpack_fp4(codes, at + tile * step, levels, into + tile * size, stride)


@_inner
def _unpack_factors(weight, panel, factors, place, interleaved):
    """Unpack the scales and biases of a panel -> factors, at the same place. They are bytes, whatever their dtype."""
    _, scales, _, kind, base, group_tiles, num_tiles, _, _ = weight
    size = TILE_ROWS if kind == EXPONENT else TILE_FACTORS * (4 if kind == FLOAT else 2)
    num_groups = num_tiles // group_tiles
    at, into, stride = panel * num_groups * size, place * TILE_ROWS, interleaved * TILE_ROWS
    for _ in range(num_groups):
        for _ in range(group_tiles):
            if kind == HALF:
                factors_half(scales, at, factors, into, stride, base)
            elif kind == BFLOAT:
                factors_bfloat(scales, at, factors, into, stride, base)
            elif kind == FLOAT:
                factors_float(scales, at, factors, into, stride, base)
            else:
                factors_exponent(scales, at, factors, into, stride, base)
            into += interleaved * TILE_FACTORS
        at += size


@_inner
def _multiply_panels(weight, panels, x, out, first):
    """Multiply the panels from `panels[0]` to `panels[1]` by all vectors."""
    codes, bits, n = weight[0], weight[2], weight[6]
    levels = np.empty(NUM_INTERLEAVED * n * TILE_VALUES, np.int8)
    factors = np.empty(NUM_INTERLEAVED * n * TILE_FACTORS, np.float32)
    last = panels[1] - (panels[1] - panels[0]) % NUM_INTERLEAVED
    for panel in range(panels[0], last, NUM_INTERLEAVED):
        for place in range(NUM_INTERLEAVED):
            _unpack(codes, bits, panel + place, n, levels, place, NUM_INTERLEAVED)
            _unpack_factors(weight, panel + place, factors, place, NUM_INTERLEAVED)
        _multiply_unpacked(levels, factors, n, x, out, first + panel * TILE_ROWS)
    for panel in range(last, panels[1]):
        _unpack(codes, bits, panel, n, levels, 0, 1)
        _unpack_factors(weight, panel, factors, 0, 1)
        _multiply_last(levels, factors, n, x, out, first + panel * TILE_ROWS)


@_inner
def _multiply_unpacked(levels, factors, n, x, out, into):
    high, low, scales, sums = x
    num, stride = out.shape
    in_fours = num // 4 * 4
    if low.size:
        for i in range(0, in_fours, 4):
            dot16_4(levels, 0, factors, high, low, scales, sums, i * n, n, out, i * stride + into, stride)
        for i in range(in_fours, num):
            dot16_1(levels, 0, factors, high, low, scales, sums, i * n, n, out, i * stride + into, stride)
    else:
        for i in range(0, in_fours, 4):
            dot8_4(levels, 0, factors, high, low, scales, sums, i * n, n, out, i * stride + into, stride)
        for i in range(in_fours, num):
            dot8_1(levels, 0, factors, high, low, scales, sums, i * n, n, out, i * stride + into, stride)


@_inner
def _multiply_last(levels, factors, n, x, out, into):
    high, low, scales, sums = x
    num, stride = out.shape
    for i in range(num):
        if low.size:
            dot16_last(levels, 0, factors, high, low, scales, sums, i * n, n, out, i * stride + into, stride)
        else:
            dot8_last(levels, 0, factors, high, low, scales, sums, i * n, n, out, i * stride + into, stride)


@_inner
def _multiply_one(weight, panels, x, out, first):
    """Multiply panels by one vector, unpacking 4-bit or 8-bit codes in registers."""
    codes, bits, n = weight[0], weight[2], weight[6]
    high, low, scales, sums = x
    factors = np.empty(n * TILE_FACTORS, np.float32)
    for panel in range(panels[0], panels[1]):
        at, into = panel * n * TILE_VALUES * bits // 8, first + panel * TILE_ROWS
        _unpack_factors(weight, panel, factors, 0, 1)
        if bits == 4:
            if low.size:
                dot16_codes_4(codes, at, factors, high, low, scales, sums, 0, n, out, into, 0)
            else:
                dot8_codes_4(codes, at, factors, high, low, scales, sums, 0, n, out, into, 0)
        elif low.size:
            dot16_codes_8(codes, at, factors, high, low, scales, sums, 0, n, out, into, 0)
        else:
            dot8_codes_8(codes, at, factors, high, low, scales, sums, 0, n, out, into, 0)


@njit(parallel=True, nogil=True, cache=True)
def multiply(weight, x, out, first):
    """Multiply by rounded activations -> out[:, first:]

    `x`: upper 8 bits and lower 8 bits [vectors, in], the latter empty for 8-bit activations; scales and sums of groups
    [vectors, groups]
    """
    num_panels = weight[7]
    is_direct = out.shape[0] == 1 and weight[2] in (4, 8)
    for task in prange((num_panels + TASK_PANELS - 1) // TASK_PANELS):
        panels = (task * TASK_PANELS, min(num_panels, task * TASK_PANELS + TASK_PANELS))
        if is_direct:
            _multiply_one(weight, panels, x, out, first)
        else:
            _multiply_panels(weight, panels, x, out, first)


@njit(parallel=True, nogil=True, cache=True)
def multiply_exactly(weight, x, sums, out, first):
    """Multiply by activations as float32 -> out[:, first:]"""
    num_tiles, num_panels = weight[6], weight[7]
    num, stride = out.shape
    for task in prange((num_panels + TASK_PANELS - 1) // TASK_PANELS):
        levels, factors = np.empty(num_tiles * TILE_VALUES, np.int8), np.empty(num_tiles * TILE_FACTORS, np.float32)
        for panel in range(task * TASK_PANELS, min(num_panels, task * TASK_PANELS + TASK_PANELS)):
            _unpack(weight[0], weight[2], panel, num_tiles, levels, 0, 1)
            _unpack_factors(weight, panel, factors, 0, 1)
            for i in range(num):
                place = i * stride + first + panel * TILE_ROWS
                dot_exact(levels, factors, x, sums, i * num_tiles, num_tiles, out, place)


@njit(parallel=True, nogil=True, cache=True)
def dequantize(weight, panels, out):
    """Convert the listed panels to float32 -> out [8 * panels, in]"""
    num_tiles, stride = weight[6], out.shape[1]
    for i in prange(len(panels)):
        levels, factors = np.empty(num_tiles * TILE_VALUES, np.int8), np.empty(num_tiles * TILE_FACTORS, np.float32)
        _unpack(weight[0], weight[2], panels[i], num_tiles, levels, 0, 1)
        _unpack_factors(weight, panels[i], factors, 0, 1)
        for tile in range(num_tiles):
            dequantize_tile(levels, factors, tile, out, i * TILE_ROWS * stride + tile * TILE_COLUMNS, stride)


@_inner
def _quantize(x, coded, first, end):
    high, low, scales, sums = coded
    if low.size:
        for group in range(first, end):
            quantize_16(x, high, low, scales, sums, group)
    else:
        for group in range(first, end):
            quantize_8(x, high, low, scales, sums, group)


@njit(nogil=True, cache=True)
def quantize(x, coded):
    _quantize(x, coded, 0, coded[2].size)


@njit(parallel=True, nogil=True, cache=True)
def quantize_parallel(x, coded):
    num, groups = coded[2].shape
    for i in prange(num):
        _quantize(x, coded, i * groups, i * groups + groups)


@njit(nogil=True, cache=True, fastmath=True)
def sum_groups(x, sums):
    """Sum each group of 32 values."""
    for i in range(x.shape[0]):
        for group in range(sums.shape[1]):
            total = np.float32(0)
            for j in range(group * TILE_COLUMNS, group * TILE_COLUMNS + TILE_COLUMNS):
                total += x[i, j]
            sums[i, group] = total


@njit(parallel=True, nogil=True, cache=True)
def pack(stream, bits, row_bytes, codes):
    """Pack MLX's stream of codes, the lowest bits first -> planes in tiles. Rows past the last are not written."""
    num_rows = len(stream) // row_bytes
    num_tiles = row_bytes * 8 // bits // TILE_COLUMNS
    for row in prange(num_rows):
        first = row // TILE_ROWS * num_tiles
        if bits == 4:
            _pack_4(stream.view(np.uint16), row, row_bytes // 2, num_tiles, first, codes.view(np.uint32))
        elif bits == 8:
            _pack_8(stream.view(np.uint32), row, row_bytes // 4, num_tiles, first, codes.view(np.uint32))
        else:
            _pack_any(stream, row, row_bytes, bits, num_tiles, first, codes)


@_inner
def _pack_4(stream, row, row_size, num_tiles, first, codes):
    """Pack 4-bit codes four at a time: vectors 0 to 3 of a tile are low nibbles, 4 to 7 the high ones."""
    lane = row % TILE_ROWS
    for tile in range(num_tiles):
        at, into = row * row_size + tile * 8, (first + tile) * 32 + lane
        for i in range(4):
            codes[into + i * TILE_ROWS] = _as_bytes(stream[at + i]) | (_as_bytes(stream[at + 4 + i]) << np.uint32(4))


@njit(inline="always")
def _as_bytes(nibbles):
    """Move four nibbles to the low halves of four bytes."""
    pairs = np.uint32(nibbles)
    pairs = (pairs | (pairs << np.uint32(8))) & np.uint32(0x00FF00FF)
    return (pairs | (pairs << np.uint32(4))) & np.uint32(0x0F0F0F0F)


@_inner
def _pack_8(stream, row, row_size, num_tiles, first, codes):
    lane = row % TILE_ROWS
    for tile in range(num_tiles):
        at, into = row * row_size + tile * 8, (first + tile) * 64 + lane
        for i in range(8):
            codes[into + i * TILE_ROWS] = stream[at + i]


@_inner
def _pack_any(stream, row, row_bytes, bits, num_tiles, first, codes):
    step, mask = TILE_VALUES * bits // 8, (1 << bits) - 1
    for column in range(num_tiles * TILE_COLUMNS):
        at = column * bits
        place = row * row_bytes + at // 8
        pair = np.int64(stream[place])
        if at % 8 + bits > 8:
            pair |= np.int64(stream[place + 1]) << 8
        code = (pair >> (at % 8)) & mask
        vector, lane = column % TILE_COLUMNS // 4, row % TILE_ROWS * 4 + column % 4
        _write_code(codes, (first + column // TILE_COLUMNS) * step, vector, lane, code, bits)


@_inner
def _write_code(codes, at, vector, lane, code, bits):
    """Write one code to the planes of its tile."""
    left = bits
    while left > 0:
        plane = 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        num = plane
        place = at + vector % num * 4 * TILE_ROWS + lane
        field = code & ((1 << plane) - 1)
        codes[place] |= np.uint8(field << (vector // num * plane))
        at += num * 4 * TILE_ROWS
        code >>= plane
        left -= plane
