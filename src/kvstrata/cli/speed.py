"""Speed of one matrix product through MLX and through numpy, which tells whether the BLAS in use is a good one.

512x1024 @ 1024x1024 in float32 is about the work of one layer for a prefill chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ROWS, INNER, COLUMNS = 512, 1024, 1024

PRODUCT_FLOP = 2 * ROWS * INNER * COLUMNS


def mlx_gflops(repeats: int = 5) -> float:
    import mlx.core as mx

    a, b = mx.random.normal((ROWS, INNER)), mx.random.normal((INNER, COLUMNS))
    mx.eval(a, b)
    return PRODUCT_FLOP / _best_s(lambda: mx.eval(a @ b), repeats) / 1e9


def numpy_gflops(repeats: int = 5) -> float:
    import numpy as np

    random = np.random.default_rng(0)
    a = random.standard_normal((ROWS, INNER), dtype=np.float32)
    b = random.standard_normal((INNER, COLUMNS), dtype=np.float32)
    return PRODUCT_FLOP / _best_s(lambda: a @ b, repeats) / 1e9


def _best_s(action: Callable[[], object], repeats: int) -> float:
    """Return the shortest of several durations: threads that another library left spinning slow the first ones down."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)
