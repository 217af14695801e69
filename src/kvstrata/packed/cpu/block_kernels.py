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
BUILT_ON = "cf612e9705121d5f"


@njit(nogil=True)
def _apply_norm(x, weight_and_eps):
    """Apply the norm; without weights return x unchanged."""
    weight, eps = weight_and_eps
    if not len(weight):
        return x
    out = np.empty_like(x)
    norm(x, weight, eps, out)
    return out


@njit(nogil=True)
def _product(x, weights, bias, activations, columns):
    """Multiply x [tokens, in] by each weight -> [tokens, columns], the products side by side"""
    tokens, size = x.shape
    low = size if activations == 16 else 0
    groups = (tokens, size // TILE_COLUMNS)
    coded = (
        np.empty((tokens, size), np.int8),
        np.empty((tokens, low), np.int8),
        np.empty(groups, np.float32),
        np.empty(groups, np.float32),
    )
    quantize(x, coded)
    # Not a bare 0: numba compiles a function for each literal.
    out, first = np.empty((tokens, columns), np.float32), np.int64(0)
    for i in range(len(weights)):
        if weights[i][8]:
            multiply(weights[i], coded, out, first)
            first += weights[i][8]
    if len(bias):
        for row in range(tokens):
            for i in range(columns):
                out[row, i] += bias[i]
    return out


@njit(nogil=True, cache=True)
def project(h, attention_norm, weights, bias, activations, head_norms, eps, rotation, qkv):
    """Project h [tokens, dim] to q, k and v [rows, heads, tokens, dim], with head norms and RoPE rotation applied."""
    columns = (qkv[0].shape[1] + 2 * qkv[1].shape[1]) * qkv[0].shape[3]
    # `heads` adds the bias.
    projected = _product(_apply_norm(h, attention_norm), weights, bias[:0], activations, columns)
    heads(projected, bias, head_norms, eps, rotation, qkv)


@njit(nogil=True, cache=True)
def finish(h, mixed, output, mlp, activations):
    """Compute the block after attention, whose result is `mixed` [tokens, heads * dim] -> [tokens, dim]

    `output`: weights and bias of the output layer, post-norm. `mlp`: norm; weights and bias of gate and up; activation
    function; weights and bias of down; post-norm.
    """
    weights, bias, post_norm = output
    dim = h.shape[1]
    h = h + _apply_norm(_product(mixed, weights, bias, activations, dim), post_norm)
    mlp_norm, wide_weights, wide_bias, function, down_weights, down_bias, post_norm = mlp
    inner = wide_weights[0][8] + wide_weights[1][8]
    wide = _product(_apply_norm(h, mlp_norm), wide_weights, wide_bias, activations, inner)
    gated = np.empty((len(h), inner // 2), np.float32)
    gate(wide, function, gated)
    return h + _apply_norm(_product(gated, down_weights, down_bias, activations, dim), post_norm)


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
