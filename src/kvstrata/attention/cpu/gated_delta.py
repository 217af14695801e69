"""The gated delta rule on a CPU: the loop of delta_kernels.py on MLX's memory. Needs numba."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvstrata.attention.cpu.step import PARALLEL_ASLEEP, available
from kvstrata.codecs.cpu.planes import are_computed, threads_for

# Entries of a key, and values of a head, that the loop takes at once.
_K_STEP, _V_STEP = 16, 4


def takes(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array) -> bool:
    """Whether the loop takes these arrays: it checks no bounds and, unlike MLX, does not broadcast."""
    rows, tokens, k_heads, k_dim = k.shape
    heads, v_dim = v.shape[2:]
    places = (rows, tokens, heads)
    fits = q.shape == k.shape and v.shape[:2] == k.shape[:2] and state.shape == (rows, heads, v_dim, k_dim)
    fits &= beta.shape == places and g.shape in (places, (*places, k_dim))
    fits &= not (heads % k_heads or k_dim % _K_STEP or v_dim % _V_STEP)
    return available() and fits and are_computed((q, k, v, g, beta, state))


def update(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Compute `gated_delta.update`, with the mask applied to the arrays already."""
    from kvstrata.attention.cpu import delta_kernels as cpu_delta_kernels

    dtype = q.dtype
    gates = g if g.ndim == 4 else g[..., None]
    inputs = [mx.contiguous(array.astype(mx.float32)) for array in (q, k, v, gates, beta, state)]
    new_state, out = mx.zeros(state.shape), mx.zeros(v.shape)
    mx.eval(inputs, new_state, out)
    with threads_for(is_large=q.shape[1] * state.size >= PARALLEL_ASLEEP):
        cpu_delta_kernels.update(*map(np.asarray, (*inputs, new_state, out)))
    return out.astype(dtype), new_state.astype(state.dtype)
