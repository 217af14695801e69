"""Which of four ways products with planes are computed on this machine. All give the same values.

kernels    a CPU with numba (the extra `cpu`): loops of our own over MLX's memory
packed     Metal: `mx.quantized_matmul` on the planes as they are
fused      CUDA: kernels of our own that read the planes as they are (see cuda.py)
decoded    elsewhere, and where the others do not fit: decode, then an ordinary product
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal

import mlx.core as mx

Path = Literal["kernels", "packed", "fused", "decoded"]


@cache
def on_cpu() -> bool:
    return mx.default_device() == mx.cpu


@cache
def active() -> Path:
    if on_cpu():
        return "kernels" if importlib.util.find_spec("numba") is not None else "decoded"
    if mx.metal.is_available():
        return "packed"
    return "fused" if mx.cuda.is_available() else "decoded"
