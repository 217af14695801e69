"""Which of four ways products with planes are computed on this machine. All give the same values.

kernels    a CPU with numba (the extra `cpu`): loops of our own over MLX's memory
packed     Metal: `mx.quantized_matmul` on the planes as they are
fused      CUDA: kernels of our own that read the planes as they are (see cuda.py)
decoded    elsewhere, and where the others do not fit: decode, then an ordinary product
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import mlx.core as mx

Path = Literal["kernels", "packed", "fused", "decoded"]

_pretended: list[Path] = []


def active() -> Path:
    return _pretended[-1] if _pretended else _found()


def on_cpu() -> bool:
    """Whether sizes are a CPU's: Metal's path, wherever it runs, has those of a GPU."""
    return active() in ("kernels", "decoded") and mx.default_device() == mx.cpu


@contextmanager
def as_on_metal() -> Iterator[None]:
    """What a Mac runs, on any machine: no kernels of ours, so nothing but MLX is needed. Not as fast as there."""
    _pretended.append("packed")
    try:
        yield
    finally:
        _pretended.pop()


@cache
def _found() -> Path:
    if mx.default_device() == mx.cpu:
        return "kernels" if importlib.util.find_spec("numba") is not None else "decoded"
    if mx.metal.is_available():
        return "packed"
    return "fused" if mx.cuda.is_available() else "decoded"
