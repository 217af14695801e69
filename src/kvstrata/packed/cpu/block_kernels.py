# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""Kernels of a transformer block and of single operations."""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit, prange

from kvstrata.codecs.cpu.vectors import exp
from kvstrata.packed.cpu.products import multiply, quantize
from kvstrata.packed.cpu.rows import gate, heads, norm
from kvstrata.packed.quantized import TILE_COLUMNS

# As in attention/cpu/kernels.py.
BUILT_ON = "13e93fb722bc3752"


@njit(nogil=True)
def _normed(x, with_weight):
    """Apply the norm; without weights return x unchanged."""
    weight, eps = with_weight
    if not len(weight):
        return x
    made = np.empty_like(x)
    norm(x, weight, eps, made)
    return made


@njit(nogil=True)
def _product(x, weights, bias, width, columns):
    """Multiply x [tokens, in] by each weight -> [tokens, columns], the products side by side"""
    tokens, size = x.shape
    low = size if width == 16 else 0
    groups = (tokens, size // TILE_COLUMNS)
    coded = (
        np.empty((tokens, size), np.int8),
        np.empty((tokens, low), np.int8),
        np.empty(groups, np.float32),
        np.empty(groups, np.float32),
    )
    quantize(x, coded)
    # Not a bare 0: numba compiles a function for each literal.
    made, first = np.empty((tokens, columns), np.float32), np.int64(0)
    for i in range(len(weights)):
        if weights[i][8]:
            multiply(weights[i], coded, made, first)
            first += weights[i][8]
    if len(bias):
        for row in range(tokens):
            for i in range(columns):
                made[row, i] += bias[i]
    return made


@njit(nogil=True, cache=True)
def project(h, before, weights, bias, width, norms, eps, turn, into):
    """Project h [tokens, dim] to q, k and v [rows, heads, tokens, dim], normed and RoPE-rotated."""
    columns = (into[0].shape[1] + 2 * into[1].shape[1]) * into[0].shape[3]
    # `heads` adds the bias.
    made = _product(_normed(h, before), weights, bias[:0], width, columns)
    heads(made, bias, norms, eps, turn, into)


@njit(nogil=True, cache=True)
def finish(h, mixed, out, mlp, width):
    """Compute the block after attention, whose result is `mixed` [tokens, heads * dim] -> [tokens, dim]. `out`:
    weights, bias, norm behind. `mlp`: norm in front; weights and bias of gate and up; activation; weights and bias of
    down; norm behind."""
    weights, bias, behind = out
    dim = h.shape[1]
    h = h + _normed(_product(mixed, weights, bias, width, dim), behind)
    between, wide_weights, wide_bias, activation, down_weights, down_bias, behind = mlp
    inner = wide_weights[0][8] + wide_weights[1][8]
    wide = _product(_normed(h, between), wide_weights, wide_bias, width, inner)
    gated = np.empty((len(h), inner // 2), np.float32)
    gate(wide, activation, gated)
    return h + _normed(_product(gated, down_weights, down_bias, width, dim), behind)


# Sums in any order; NaN stays NaN.
FAST = {"contract", "reassoc", "nsz", "arcp"}

# Numbers that a thread takes at once.
PIECE = 4096

_one = np.float32(1)

_inner = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True, fastmath=FAST, error_model="numpy")

_parallel = partial(njit, parallel=True, nogil=True, cache=True, fastmath=FAST, error_model="numpy")


# Slices begin at 0: numba checks other indices one by one for negative values.
@_inner
def _silu(x, out):
    for i in range(len(x)):
        out[i] = x[i] / (_one + exp(-x[i]))


@_inner
def _gated(gate, x, out):
    for i in range(len(x)):
        out[i] = gate[i] / (_one + exp(-gate[i])) * x[i]


@_inner
def _convolve(x, weight, out):
    """Compute one token: x [length, channels]."""
    for c in range(len(out)):
        out[c] = x[0, c] * weight[0, c]
    for j in range(1, len(weight)):
        for c in range(len(out)):
            out[c] += x[j, c] * weight[j, c]


@_parallel()
def silu(x, out):
    for piece in prange((len(x) + PIECE - 1) // PIECE):
        start, end = piece * PIECE, min(len(x), (piece + 1) * PIECE)
        _silu(x[start:end], out[start:end])


@_parallel()
def gated(gate, x, out):
    for piece in prange((len(x) + PIECE - 1) // PIECE):
        start, end = piece * PIECE, min(len(x), (piece + 1) * PIECE)
        _gated(gate[start:end], x[start:end], out[start:end])


@_parallel()
def convolve(x, weight, out):
    """Convolve x [rows, tokens + length - 1, channels], weight [length, channels], out [rows, tokens, channels]"""
    rows, tokens, _ = out.shape
    for place in prange(rows * tokens):
        row, token = place // tokens, place % tokens
        _convolve(x[row, token : token + len(weight)], weight, out[row, token])
