"""Replacements for operations that are slow in MLX on a CPU: silu, gating by silu, and short convolutions.

MLX computes these operations on one core, value by value. Fused blocks (block.py) need none of them. Recurrent layers
and experts do; in a hybrid model these operations took more time than the products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import activations

from kvstrata.codecs.backends import runtime
from kvstrata.codecs.cpu.planes import are_computed, threads_for
from kvstrata.platform.rebinding import rebind

# Fewest values for a loop of ours: with fewer, MLX ends before the loop has begun.
MIN_VALUES = 1024
# Fewest values that are worth waking other threads.
PARALLEL_VALUES = 1 << 16

_silu, _conv1d = nn.silu, mx.conv1d


def install() -> None:
    """Make models call these functions, which have no gradients. Call it after a model was loaded."""
    nn.silu, mx.conv1d = silu, conv1d
    rebind(activations.swiglu, swiglu)
    rebind(activations.precise_swiglu, precise_swiglu)


def silu(x: mx.array) -> mx.array:
    if not _can_run(x):
        return _silu(x)
    from kvstrata.packed.cpu import block_kernels as cpu_block_kernels

    return _run_loop(cpu_block_kernels.silu, x.shape, np.asarray(x))


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    if gate.shape != x.shape or not _can_run(gate, x):
        return activations.swiglu(gate, x)
    from kvstrata.packed.cpu import block_kernels as cpu_block_kernels

    return _run_loop(cpu_block_kernels.gated, x.shape, np.asarray(gate), np.asarray(x))


def precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Compute `swiglu` in float32, whatever the dtype of the inputs; the result has the dtype of `h`."""
    if any(array.dtype != mx.float32 for array in (h, gate, x)):
        return activations.precise_swiglu(h, gate, x)
    return swiglu(gate, x)


def conv1d(
    x: mx.array, weight: mx.array, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1, **options: Any
) -> mx.array:
    """Convolve x [rows, tokens, channels] with weight [channels, length, 1], in a loop of ours if it is depthwise."""
    is_plain = (stride, padding, dilation) == (1, 0, 1) and not options and groups > 1
    is_depthwise = groups == x.shape[-1] == weight.shape[0]
    if not is_plain or not is_depthwise or x.shape[1] < weight.shape[1] or not _can_run(x, weight):
        return _conv1d(x, weight, stride, padding, dilation, groups, **options)
    from kvstrata.packed.cpu import block_kernels as cpu_block_kernels

    shape = (x.shape[0], x.shape[1] - weight.shape[1] + 1, x.shape[2])
    return _run_loop(cpu_block_kernels.convolve, shape, np.asarray(x), np.asarray(weight)[..., 0].T, flat=False)


def _can_run(*arrays: mx.array) -> bool:
    is_ours = runtime().backend == "cpu" and arrays[0].size >= MIN_VALUES
    return is_ours and all(array.dtype == mx.float32 for array in arrays) and are_computed(arrays)


def _run_loop(loop: Callable[..., None], shape: tuple[int, ...], *inputs: np.ndarray, flat: bool = True) -> mx.array:
    """Run a loop over arrays. `flat`: with one axis, so that numba compiles the loop once for all shapes."""
    out = np.empty(shape, np.float32)
    arrays = [*map(np.ascontiguousarray, inputs), out]
    with threads_for(is_large=out.size >= PARALLEL_VALUES):
        loop(*(array.reshape(-1) if flat else array for array in arrays))
    return mx.array(out)
