"""The gated delta rule (gated_delta.py) on a CPU: the loop of cpu_delta_kernels.py on MLX's memory. Needs numba."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvstrata.attention.cpu import PARALLEL_ASLEEP, available
from kvstrata.codecs.cpu import threads_for

# Entries of a key that the loop takes at once, and values of a head.
_K_STEP, _V_STEP = 16, 4


def takes(k: mx.array, v: mx.array) -> bool:
    return available() and k.shape[3] % _K_STEP == 0 and v.shape[3] % _V_STEP == 0


def update(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """As `gated_delta.update`. The state that is given may be shared: a copy is written."""
    from kvstrata.attention import cpu_delta_kernels

    dtype = q.dtype
    gates = g if g.ndim == 4 else g[..., None]
    inputs = [mx.contiguous(array.astype(mx.float32)) for array in (q, k, v, gates, beta)]
    out, new_state = mx.zeros(v.shape), mx.array(state, mx.float32)
    mx.eval(inputs, out, new_state)
    with threads_for(is_large=q.shape[1] * state.size >= PARALLEL_ASLEEP):
        cpu_delta_kernels.update(*map(np.asarray, (*inputs, new_state, out)))
    return out.astype(dtype), new_state.astype(state.dtype)
