"""Attention on a plain CPU in float32: kernels of our own over zero-copy views of MLX's arrays.

MLX's `exp` is scalar and on one core there, and each of its operations costs about 10 us; a softmax here is ten times
faster, and a decode step over one sequence is one call. Products of matrices stay with MLX, which hands them to BLAS.

The kernels see evaluated memory, so attention is a point where the graph is computed: on a CPU nothing is lost by that.
They need numba, which the extra `cpu` installs; without it MLX's own operations are used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

# Queries of one block of a causal prefill: keys that no query of the block sees are not multiplied at all.
BLOCK = 128


_NO_SINKS = np.empty(0, np.float32)


class Run(Protocol):
    """The first `num_tokens` of a buffer [1, kv_heads, size, dim]."""

    @property
    def k_buffer(self) -> mx.array: ...
    @property
    def v_buffer(self) -> mx.array: ...
    @property
    def num_tokens(self) -> int: ...


@cache
def available() -> bool:
    return mx.default_device() == mx.cpu and importlib.util.find_spec("numba") is not None


def decode_rows(
    queries: mx.array,  # [rows, heads, 1, k_dim]
    rows: Sequence[Sequence[Run]],
    scale: float,
    sinks: mx.array | None,  # [heads]
) -> mx.array:
    """One query for each row over all that the row holds."""
    from kvstrata.layers import cpu_kernels

    mx.eval(queries, sinks, [(run.k_buffer, run.v_buffer) for runs in rows for run in runs])
    q = np.asarray(queries)[:, :, 0]
    num_sinks = np.asarray(sinks) if sinks is not None else _NO_SINKS
    out = np.zeros((*q.shape[:2], rows[0][0].v_buffer.shape[3]), np.float32)
    for row, runs in enumerate(rows):
        scores = np.empty((q.shape[1], sum(run.num_tokens for run in runs)), np.float32)
        at = 0
        for run in runs:
            cpu_kernels.score(q[row], np.asarray(run.k_buffer), run.num_tokens, scale, scores, at)
            at += run.num_tokens
        cpu_kernels.softmax(scores, num_sinks)
        at = 0
        for run in runs:
            cpu_kernels.mix(scores, at, np.asarray(run.v_buffer), run.num_tokens, out[row])
            at += run.num_tokens
    return mx.array(out[:, :, None])


def prefill(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Causal attention of one row: q [1, heads, tokens, k_dim] are the last of k [1, kv_heads, total, k_dim]."""
    from kvstrata.layers import cpu_kernels

    heads, tokens, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    past = k.shape[2] - tokens
    grouped = (q * scale).reshape(1, kv_heads, heads // kv_heads, tokens, q.shape[3])
    out = []
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        block = grouped[:, :, :, start:end].reshape(1, kv_heads, -1, q.shape[3])
        scores = block @ k[:, :, : past + end].swapaxes(-1, -2)
        mx.eval(scores)
        cpu_kernels.softmax_causal(np.asarray(scores).reshape(-1, past + end), past + start, end - start)
        mixed = scores @ v[:, :, : past + end]
        out.append(mixed.reshape(1, heads, end - start, v.shape[3]))
    return mx.concatenate(out, axis=2) if len(out) > 1 else out[0]


def fits(*arrays: Any) -> bool:
    return available() and all(array.dtype == mx.float32 for array in arrays)
