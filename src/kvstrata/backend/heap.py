"""Has the C library give memory back that was freed. On a CPU MLX takes its arrays from `malloc`, and glibc keeps what
is freed: each large buffer that goes raises the size from which on buffers are mapped one by one, up to 32 MiB, and
what lies below that in its heaps goes back only from their upper end.

Knows glibc's and macOS's calls. Knows nothing of what is allocated. On a GPU MLX allocates in other ways and returns
what its cache does not keep; the calls here do no harm then.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
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
    """From now on, for this process. What the user has set in the environment stays."""
    if _library() == "glibc" and not _is_set_by_user():
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        libc.mallopt(M_MMAP_MAX, MAX_MAPPED)


def trim_heap() -> None:
    """Give back the pages that nothing lies on. Takes some ms for each 100 MiB of them."""
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
    """GLIBC_TUNABLES is for many things: only those of malloc count."""
    return any("malloc" in f"{name}={os.environ[name]}".lower() for name in SET_BY_USER if name in os.environ)
