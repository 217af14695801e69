"""MLX's two limits of memory: what it keeps of what was freed, and how much may be alive while it runs ahead. They are
the process's, so the code that sets them puts them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limits_restored() -> Iterator[None]:
    import mlx.core as mx

    memory_bytes = mx.set_memory_limit(0)
    mx.set_memory_limit(memory_bytes)
    cache_bytes = mx.set_cache_limit(0)
    mx.set_cache_limit(cache_bytes)
    try:
        yield
    finally:
        mx.set_memory_limit(memory_bytes)
        mx.set_cache_limit(cache_bytes)
