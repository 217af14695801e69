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

_parallel = partial(njit, parallel=True, nogil=True, cache=True, fastmath=FAST, error_model="numpy")


@_parallel()
def silu(x, out):
    for piece in prange((len(x) + PIECE - 1) // PIECE):
        for i in range(piece * PIECE, min(len(x), (piece + 1) * PIECE)):
            out[i] = x[i] / (_one + exp(-x[i]))


@_parallel()
def gated(gate, x, out):
    for piece in prange((len(x) + PIECE - 1) // PIECE):
        for i in range(piece * PIECE, min(len(x), (piece + 1) * PIECE)):
            out[i] = gate[i] / (_one + exp(-gate[i])) * x[i]


@_parallel()
def convolve(x, weight, out):
    """x [rows, tokens + length - 1, channels], weight [length, channels], out [rows, tokens, channels]"""
    rows, tokens, channels = out.shape
    for place in prange(rows * tokens):
        row, token = place // tokens, place % tokens
        for c in range(channels):
            out[row, token, c] = x[row, token, c] * weight[0, c]
        for j in range(1, len(weight)):
            for c in range(channels):
                out[row, token, c] += x[row, token + j, c] * weight[j, c]
