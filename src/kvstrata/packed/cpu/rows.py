# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""Operations between the products of a block, on rows of float32 [tokens, dim]; compiled by numba, cached on disk.

MLX runs each of them on one core and spends microseconds on the call.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit, prange

from kvstrata.codecs.cpu.vectors import exp

# As in attention/cpu/kernels.py.
BUILT_ON = "16a00a12344adb9a"

# Sums in any order; NaN and infinity stay what they are.
FAST = {"contract", "reassoc", "nsz", "arcp"}

SILU, GELU = 0, 1

# Fewest rows that are worth waking other threads.
PARALLEL_ROWS = 16

# gelu(x) by tanh: sqrt(2 / pi), twice, since tanh(u) = 1 - 2 / (1 + e**2u)
_GELU_SLOPE, _GELU_CUBE = np.float32(2 * 0.7978845608028654), np.float32(0.044715)

_one = np.float32(1)

_inner = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True, fastmath=FAST)


@_inner
def _norm_row(x, weight, eps, out):
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = _one / np.sqrt(total / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = x[i] * factor * weight[i]


@njit(nogil=True, cache=True, fastmath=FAST)
def norm(x, weight, eps, out):
    """Compute the RMS norm of each row."""
    for row in range(len(x)):
        _norm_row(x[row], weight, eps, out[row])


@njit(parallel=True, nogil=True, cache=True, fastmath=FAST)
def norm_parallel(x, weight, eps, out):
    for row in prange(len(x)):
        _norm_row(x[row], weight, eps, out[row])


@_inner
def _gate_row(x, kind, out):
    num = len(out)
    if kind == SILU:
        for i in range(num):
            out[i] = x[i] / (_one + exp(-x[i])) * x[num + i]
    else:
        for i in range(num):
            u = _GELU_SLOPE * x[i] * (_one + _GELU_CUBE * x[i] * x[i])
            out[i] = x[i] * (_one - _one / (_one + exp(u))) * x[num + i]


@njit(nogil=True, cache=True, fastmath=FAST)
def gate(x, kind, out):
    """Multiply the activation of the first half of x [rows, 2 * dim] by the second half -> [rows, dim]"""
    for row in range(len(x)):
        _gate_row(x[row], kind, out[row])


@njit(parallel=True, nogil=True, cache=True, fastmath=FAST)
def gate_parallel(x, kind, out):
    for row in prange(len(x)):
        _gate_row(x[row], kind, out[row])


@_inner
def _head(x, weight, eps, angles, num_pairs, step, gap, out):
    """Apply the norm, if it has weights, and the RoPE rotation to a head of one token. The bias was added before."""
    if len(weight):
        _norm_row(x, weight, eps, out)
    else:
        for i in range(len(x)):
            out[i] = x[i]
    for pair in range(num_pairs):
        a = pair * step
        first, second, cos, sin = out[a], out[a + gap], angles[a], angles[a + gap]
        out[a] = first * cos - second * sin
        out[a + gap] = first * sin + second * cos


@_inner
def _heads_row(x, bias, norms, eps, rotation, token, qkv):
    """Compute all heads of one token."""
    q_out, k_out, v_out = qkv
    tokens, dim = q_out.shape[2], q_out.shape[3]
    angles, num_pairs, step, gap = rotation
    row, place = token // tokens, token % tokens
    if len(bias):
        for i in range(len(x)):
            x[i] += bias[i]
    at = 0
    for h in range(q_out.shape[1]):
        _head(x[at : at + dim], norms[0], eps, angles[token], num_pairs, step, gap, q_out[row, h, place])
        at += dim
    for h in range(k_out.shape[1]):
        _head(x[at : at + dim], norms[1], eps, angles[token], num_pairs, step, gap, k_out[row, h, place])
        at += dim
    for h in range(v_out.shape[1]):
        for i in range(dim):
            v_out[row, h, place, i] = x[at + i]
        at += dim


@njit(nogil=True, cache=True, fastmath=FAST)
def heads(x, bias, norms, eps, rotation, qkv):
    """Split rows of x, the projected q, k and v of each token -> three arrays [rows, heads, tokens, dim]. `rotation`:
    cos and sin of each pair of dims [tokens, dim], and the layout of pairs (`RopeTable.pair_layout`)."""
    for token in range(len(x)):
        _heads_row(x[token], bias, norms, eps, rotation, token, qkv)


@njit(parallel=True, nogil=True, cache=True, fastmath=FAST)
def heads_parallel(x, bias, norms, eps, rotation, qkv):
    for token in prange(len(x)):
        _heads_row(x[token], bias, norms, eps, rotation, token, qkv)
