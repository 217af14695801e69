"""The kernel that encodes `rotated` against MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs import cpu, paths
from kvstrata.codecs.base import half
from kvstrata.codecs.rotated import RotatedCodec, codebook

if paths.active() != "cpu":
    pytest.skip("the kernels are for a CPU with numba", allow_module_level=True)


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_kernels_encode_as_stock_operations_do(bits: int, dim: int) -> None:
    rng = np.random.default_rng(dim + bits)
    x = mx.array(rng.standard_normal((2, 3, 300, dim), np.float32) * np.exp(rng.uniform(-9, 9, (2, 3, 300, 1))))
    x = x.astype(mx.float32)
    codes, norms = cpu.encode_rotated(x, codebook(bits))
    stock_codes, stock_norms = RotatedCodec(bits).encode_stock(x).values()
    assert codes.shape == stock_codes.shape
    # Where rounding moves a value across a boundary both codes are as near.
    assert np.mean(np.array(codes) == np.array(stock_codes)) > 0.999
    np.testing.assert_allclose(np.array(norms), np.array(stock_norms), rtol=1e-2)
    assert np.median(np.abs(np.array(norms) / np.array(stock_norms) - 1)) < 1e-6


def test_odd_values_are_stored_as_by_every_codec() -> None:
    odd = np.random.default_rng(1).standard_normal((1, 4, 64)).astype(np.float32)
    odd[0, 0, 3], odd[0, 1, 5], odd[0, 2, 7], odd[0, 3, 9] = np.nan, np.inf, -np.inf, 1e30
    codec = RotatedCodec(4)
    planes = codec.encode(mx.array(odd))
    codes, norms = codec.encode_stock(mx.array(odd)).values()
    assert np.mean(np.array(planes.arrays["codes"]) == np.array(codes)) > 0.99
    np.testing.assert_allclose(np.array(planes.arrays["norms"]), np.array(half(norms)), rtol=1e-2)


def test_a_vector_of_zeros_stays_one() -> None:
    codec = RotatedCodec(3)
    planes = codec.encode(mx.zeros((1, 5, 64)))
    assert mx.array_equal(codec.decode(planes, mx.float32), mx.zeros((1, 5, 64)))
    assert mx.array_equal(planes.arrays["codes"], codec.encode_stock(mx.zeros((1, 5, 64)))["codes"])
