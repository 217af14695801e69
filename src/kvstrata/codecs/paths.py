"""Which kernels this machine has for products with planes. All give the same values.

cpu      a CPU with numba (the extra `cpu`): loops of our own over MLX's memory
metal    kernels of ours where a trial found them right and faster (planes_check.py, attention/portable_check.py), else
         `mx.quantized_matmul` on the planes as they are
cuda     kernels of our own that read the planes as they are
plain    elsewhere, and where the others do not fit: decode, then an ordinary product
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import mlx.core as mx

Path = Literal["cpu", "metal", "cuda", "plain"]

_pretended: list[Path] = []


def active() -> Path:
    return _pretended[-1] if _pretended else _found()


def on_cpu() -> bool:
    """Whether sizes are a CPU's: Metal's path, wherever it runs, has those of a GPU."""
    return active() in ("cpu", "plain") and mx.default_device() == mx.cpu


@contextmanager
def as_on_metal() -> Iterator[None]:
    """What a Mac runs, on any machine: no kernels of ours, so nothing but MLX is needed. Not as fast as there."""
    with _as_if("metal"):
        yield


@contextmanager
def without_kernels() -> Iterator[None]:
    """MLX's operations alone. Kernels of ours that a CPU runs see computed memory: with none of them a whole pass can
    stay uncomputed."""
    with _as_if("plain"):
        yield


@contextmanager
def _as_if(path: Path) -> Iterator[None]:
    _pretended.append(path)
    try:
        yield
    finally:
        _pretended.pop()


@cache
def _found() -> Path:
    if mx.default_device() == mx.cpu:
        return "cpu" if importlib.util.find_spec("numba") is not None else "plain"
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else "plain"
