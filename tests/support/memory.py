"""What MLX has allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable

import mlx.core as mx


def active_bytes() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def peak_bytes(act: Callable[[], object]) -> int:
    """What MLX allocates at most while `act` runs, beyond what was there before."""
    before = active_bytes()
    mx.reset_peak_memory()
    act()
    return mx.get_peak_memory() - before
