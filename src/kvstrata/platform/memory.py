"""The C library's heap, and MLX's two memory limits.

On a CPU MLX allocates arrays with `malloc`, and glibc keeps freed memory: each large buffer that is freed raises the
size from which buffers are mapped one by one, up to 32 MiB, and smaller ones return to the system only from the upper
end of a heap. The calls here make glibc and macOS give it back. On a GPU, where MLX allocates in other ways, they do
no harm.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

M_MMAP_THRESHOLD, M_MMAP_MAX = -3, -4  # of glibc's malloc.h
# Buffers from this size on are mapped one by one, and unmapped when they are freed.
MAPPED_BYTES = 256 << 10
# Half of what Linux lets a process map by default (vm.max_map_count): others map files and stacks.
MAX_MAPPED = 32_768
SET_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


Library = Literal["glibc", "macos", "other"]


@dataclass(frozen=True)
class Heap:
    library: Library
    gives_back: str  # how freed memory goes back to the system, for people to read


def heap() -> Heap:
    library = _library()
    if library == "other":
        return Heap(library, "as the C library sees fit: it is neither glibc nor macOS's")
    if library == "macos":
        return Heap(library, "when idle (malloc_zone_pressure_relief)")
    if _is_set_by_user():
        return Heap(library, "when idle (malloc_trim); large buffers as the environment says")
    return Heap(library, f"buffers of {MAPPED_BYTES >> 10} KiB and more at once, smaller ones when idle (malloc_trim)")


def map_large_buffers() -> None:
    """Make malloc map large buffers one by one from now on, unless the user has set malloc up in the environment."""
    if _library() == "glibc" and not _is_set_by_user():
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        libc.mallopt(M_MMAP_MAX, MAX_MAPPED)


def trim_heap() -> None:
    """Return unused pages to the system. Takes some ms for each 100 MiB of them."""
    if _library() == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    elif _library() == "macos":
        relieve = ctypes.CDLL(None).malloc_zone_pressure_relief
        relieve.argtypes, relieve.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_size_t
        relieve(None, 0)


@functools.cache
def _library() -> Library:
    names = ctypes.CDLL(None)
    if sys.platform == "darwin":
        return "macos" if hasattr(names, "malloc_zone_pressure_relief") else "other"
    # musl has neither: it maps large buffers one by one, always.
    return "glibc" if hasattr(names, "malloc_trim") and hasattr(names, "mallopt") else "other"


def _is_set_by_user() -> bool:
    """Whether the environment sets malloc up. GLIBC_TUNABLES has other tunables too, which do not count."""
    return any("malloc" in f"{name}={os.environ[name]}".lower() for name in SET_BY_USER if name in os.environ)


@contextmanager
def limits_restored() -> Iterator[None]:
    """Restore MLX's limits of cached and of allocated memory afterwards: they are the whole process's."""
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
