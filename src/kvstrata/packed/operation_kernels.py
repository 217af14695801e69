# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
"""The loops of operations.py, on float32; compiled by numba when first called and kept on disk after that."""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit, prange

from kvstrata.codecs.cpu_vectors import exp

# As in attention/cpu_kernels.py.
BUILT_ON = "625051f9f2d29c0d"

# Sums in any order; NaN stays NaN.
FAST = {"contract", "reassoc", "nsz", "arcp"}

# Numbers that a thread takes at once.
PIECE = 4096

_one = np.float32(1)

_inner = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True, fastmath=FAST, error_model="numpy")
_parallel = partial(njit, parallel=True, nogil=True, cache=True, fastmath=FAST, error_model="numpy")


# Slices begin at 0: of other indices numba looks whether they are negative, one by one.
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
    """One token: x [length, channels]"""
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
    """x [rows, tokens + length - 1, channels], weight [length, channels], out [rows, tokens, channels]"""
    rows, tokens, _ = out.shape
    for place in prange(rows * tokens):
        row, token = place // tokens, place % tokens
        _convolve(x[row, token : token + len(weight)], weight, out[row, token])
