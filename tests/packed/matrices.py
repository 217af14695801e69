"""Random matrices as MLX quantizes them, and their values as float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvstrata.packed.quantized import QuantizedMatrix

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
FORMATS = [(bits, group, dtype) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128) for dtype in DTYPES]


def quantized(rng: np.random.Generator, shape: tuple[int, ...], bits: int, group: int, dtype: str) -> QuantizedMatrix:
    weight = mx.array(rng.normal(size=shape).astype(np.float32)).astype(DTYPES[dtype])
    return QuantizedMatrix(*mx.quantize(weight, group, bits), group, bits, "affine")


def mxfp4(rng: np.random.Generator, shape: tuple[int, ...]) -> QuantizedMatrix:
    weight = mx.array(rng.normal(size=shape).astype(np.float32)).astype(mx.bfloat16)
    codes, scales, *_ = mx.quantize(weight, 32, 4, mode="mxfp4")
    return QuantizedMatrix(codes, scales, None, 32, 4, "mxfp4")


def as_floats(source: QuantizedMatrix) -> np.ndarray:
    """Return the values of a matrix as MLX dequantizes it."""
    scales, biases = source.scales, source.biases
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    values = mx.dequantize(source.weight, scales, biases, source.group, source.bits, mode=source.mode)
    return np.array(values.astype(mx.float32))
