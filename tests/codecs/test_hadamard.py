from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs.hadamard import block_of, rotate, rotate_back, sign_values
from kvstrata.codecs.planes import pack, unpack


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (80, 16), (96, 32), (128, 128), (192, 64), (256, 256)])
def test_the_rotation_is_orthogonal_and_spreads_over_its_block(dim: int, block: int) -> None:
    matrix = np.asarray(rotate(mx.eye(dim)))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-5)
    assert block_of(dim) == block
    assert np.count_nonzero(matrix) == dim * block
    np.testing.assert_allclose(np.asarray(rotate_back(rotate(mx.eye(dim)))), np.eye(dim), atol=1e-5)


def test_signs_are_part_of_the_format() -> None:
    bits = "".join("0" if sign > 0 else "1" for sign in sign_values(64))
    assert f"{int(bits, 2):016x}" == "6679dd44909da5a7"
    np.testing.assert_array_equal(sign_values(256)[:64], sign_values(64))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_are_packed_as_mlx_packs_them(bits: int) -> None:
    codes = mx.random.randint(0, 2**bits, (3, 64), key=mx.random.key(bits)).astype(mx.uint32)
    as_affine = mx.dequantize(pack(codes, bits), mx.ones((3, 1)), mx.zeros((3, 1)), group_size=64, bits=bits)
    assert bool(mx.array_equal(as_affine.astype(mx.uint32), codes))
    assert bool(mx.array_equal(unpack(pack(codes, bits), bits), codes))
