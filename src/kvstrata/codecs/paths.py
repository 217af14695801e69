"""Which of three ways products with planes are computed on this machine. All give the same values.

kernels    a CPU with numba (the extra `cpu`): loops of our own over MLX's memory
packed     Metal: `mx.quantized_matmul` on the planes as they are
decoded    elsewhere: decode, then an ordinary product. MLX's quantized one is slow on CUDA and on a CPU
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal

import mlx.core as mx

Path = Literal["kernels", "packed", "decoded"]


@cache
def active() -> Path:
    if mx.default_device() == mx.cpu:
        return "kernels" if importlib.util.find_spec("numba") is not None else "decoded"
    return "packed" if mx.metal.is_available() else "decoded"
