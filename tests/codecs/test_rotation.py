from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs import cpu, paths
from kvstrata.codecs.packing import pack, pack_bytes, unpack, unpack_bytes
from kvstrata.codecs.rotated import CENTROIDS, RotatedCodec, codebook
from kvstrata.codecs.rotation import block_of, rotate, rotate_back, sign_values
from tests.codecs.arrays import HEAD_DIMS, keys, relative_error


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


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_streams_of_bits_are_those_of_mlx(bits: int) -> None:
    codes = mx.random.randint(0, 2**bits, (3, 64), key=mx.random.key(bits)).astype(mx.uint8)
    stream = pack_bytes(codes, bits)
    assert bool(mx.array_equal(unpack_bytes(stream, bits), codes))
    as_affine = mx.dequantize(
        mx.contiguous(stream).view(mx.uint32), mx.ones((3, 1)), mx.zeros((3, 1)), group_size=64, bits=bits
    )
    assert bool(mx.array_equal(as_affine.astype(mx.uint8), codes))


@pytest.mark.parametrize("bits", CENTROIDS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_decoded_norms_are_exact(bits: int, dim: int) -> None:
    codec = RotatedCodec(bits)
    x = keys(2, 50, dim)
    decoded = codec.decode(codec.encode(x), mx.float32)
    norms = mx.linalg.norm(x, axis=-1)
    assert float(mx.abs(mx.linalg.norm(decoded, axis=-1) / norms - 1).max()) < 2**-10


@pytest.mark.parametrize(("bits", "error"), [(2, 0.11748), (3, 0.03455), (4, 0.00950)])
def test_the_codebook_reaches_its_error(bits: int, error: float) -> None:
    codec = RotatedCodec(bits)
    x = mx.random.normal((2000, 128), key=mx.random.key(5))
    found = relative_error(codec.decode(codec.encode(x), mx.float32), x) ** 2
    # Exact norms cost a little: by sqrt(1 - error), to first order, the best decoded norm is shorter.
    assert found == pytest.approx(error * (1 + error / 4), rel=0.05)


@pytest.mark.skipif(paths.active() != "cpu", reason="a CPU with numba has kernels to compare")
@pytest.mark.parametrize("bits", CENTROIDS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_kernel_looks_up_what_stock_operations_do(bits: int, dim: int) -> None:
    codec = RotatedCodec(bits)
    planes = codec.encode(keys(2, 33, dim))
    ours = cpu.look_up(planes.arrays["codes"], planes.arrays["norms"], codebook(bits), dim)
    assert relative_error(ours, codec.centroids_stock(planes)) < 1e-7
