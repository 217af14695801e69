# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""The two halves of a block around its attention, each as one call: for few tokens, and activations of 8 or 16 bits.

A call from Python costs some microseconds, and a step of a small model has hundreds of small operations.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kvstrata.packed.kernels import multiply, quantize
from kvstrata.packed.quantized import TILE_COLUMNS
from kvstrata.packed.rows import gate, heads, norm

# As in attention/cpu_kernels.py.
BUILT_ON = "250cba19d0e05214"


@njit(nogil=True)
def _normed(x, with_weight):
    """Without weights as it is."""
    weight, eps = with_weight
    if not len(weight):
        return x
    made = np.empty_like(x)
    norm(x, weight, eps, made)
    return made


@njit(nogil=True)
def _product(x, weights, bias, width, columns):
    """x [tokens, in] -> [tokens, columns], one weight beside the other"""
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
    """h [tokens, dim] -> q, k and v [rows, heads, tokens, dim], normed and turned"""
    columns = (into[0].shape[1] + 2 * into[1].shape[1]) * into[0].shape[3]
    # `heads` adds the bias.
    made = _product(_normed(h, before), weights, bias[:0], width, columns)
    heads(made, bias, norms, eps, turn, into)


@njit(nogil=True, cache=True)
def finish(h, mixed, out, mlp, width):
    """What attention gave [tokens, heads * dim], and all after it -> [tokens, dim]. `out`: weights, bias, norm behind.
    `mlp`: norm in front; weights and bias of gate and up; activation; weights and bias of down; norm behind."""
    weights, bias, behind = out
    dim = h.shape[1]
    h = h + _normed(_product(mixed, weights, bias, width, dim), behind)
    between, wide_weights, wide_bias, activation, down_weights, down_bias, behind = mlp
    inner = wide_weights[0][8] + wide_weights[1][8]
    wide = _product(_normed(h, between), wide_weights, wide_bias, width, inner)
    gated = np.empty((len(h), inner // 2), np.float32)
    gate(wide, activation, gated)
    return h + _normed(_product(gated, down_weights, down_bias, width, dim), behind)
