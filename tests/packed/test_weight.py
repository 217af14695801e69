"""Packed weights: their values beside MLX's, and their products beside float32 within the rounding of activations."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.codecs.cpu import vectors as cpu_vectors
from kvstrata.packed import quantized as quantized_matrices
from kvstrata.packed.cpu import block_kernels as cpu_block_kernels
from kvstrata.packed.cpu import products as cpu_products
from kvstrata.packed.cpu import rows as cpu_rows
from kvstrata.packed.cpu import tiles as cpu_tiles
from kvstrata.packed.form import Activations
from kvstrata.packed.quantized import QuantizedMatrix
from kvstrata.packed.weight import BLAS_VECTORS, ActivationVectors, PackedWeight, join_weights, pack
from tests.packed.matrices import FORMATS, as_floats, mxfp4, quantized


def product(weight: PackedWeight, x: np.ndarray, activations: Activations) -> np.ndarray:
    out = np.full((len(x), weight.shape[0]), np.nan, np.float32)
    weight.multiply(ActivationVectors(x, activations), out)
    return out


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("bits", "group", "dtype"), FORMATS)
def test_pack_keeps_values_of_affine_formats(bits: int, group: int, dtype: str) -> None:
    source = quantized(np.random.default_rng(bits), (24, 256), bits, group, dtype)
    assert source.fits
    np.testing.assert_allclose(pack(source).dequantize(), as_floats(source), rtol=3e-7, atol=1e-6)


def test_pack_keeps_values_of_mxfp4() -> None:
    source = mxfp4(np.random.default_rng(0), (16, 96))
    assert source.fits
    assert np.array_equal(pack(source).dequantize(), as_floats(source))


@pytest.mark.parametrize("shift", [-100, -20, 0, 20, 100])
def test_pack_keeps_mxfp4_scales_of_any_size(shift: int) -> None:
    """Scales of MXFP4 are powers of two over the range of float32."""
    source = mxfp4(np.random.default_rng(1), (8, 64))
    scales = (source.scales.astype(mx.int32) + shift).astype(mx.uint8)
    moved = QuantizedMatrix(source.weight, scales, None, 32, 4, "mxfp4")
    assert np.array_equal(pack(moved).dequantize(), as_floats(source) * np.float32(2.0) ** shift)


@given(
    seed=st.integers(0, 1000),
    form=st.sampled_from([*FORMATS, None]),
    num_rows=st.integers(1, 40),
    num_groups=st.integers(1, 3),
    vectors=st.integers(1, 2 * BLAS_VECTORS + 1),
)
def test_multiply_is_within_rounding_of_the_float32_product(
    seed: int, form: tuple[int, int, str] | None, num_rows: int, num_groups: int, vectors: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = num_groups * (form[1] if form else 32)
    source = quantized(rng, (num_rows, columns), *form) if form else mxfp4(rng, (num_rows, columns))
    weight, x = pack(source), normal(rng, vectors, columns)
    expected = x.astype(np.float64) @ as_floats(source).astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(as_floats(source)).astype(np.float64).T
    assert np.all(np.abs(product(weight, x, 32) - expected) <= 1e-5 * size + 1e-6)
    # The largest of 32 values is 127 steps of 8 bits and 32512 of 16; each is off by half a step at most.
    coded: tuple[tuple[Activations, int], ...] = ((16, 32512), (8, 127))
    for activations, steps in coded:
        rounded = np.abs(x).reshape(vectors, -1, 32).max(-1).repeat(32, -1) / steps / 2
        bound = rounded.astype(np.float64) @ np.abs(as_floats(source)).astype(np.float64).T
        assert np.all(np.abs(product(weight, x, activations) - expected) <= 1.01 * bound + 1e-5 * size + 1e-6)


@pytest.mark.parametrize("activations", [8, 16, 32])
@pytest.mark.parametrize("bits", [4, 8, 6])
def test_multiply_is_the_same_in_any_batch(activations: Activations, bits: int) -> None:
    """Then KV depends neither on other requests nor on the chunks of a prefill."""
    rng = np.random.default_rng(2)
    weight = pack(quantized(rng, (120, 128), bits, 64, "bfloat16"))
    x = normal(rng, 11, 128)
    together = product(weight, x, activations)
    if activations == 32:
        x = x[:BLAS_VECTORS]  # BLAS computes more vectors, and does not promise this
        together = product(weight, x, activations)
    for i in range(len(x)):
        assert np.array_equal(product(weight, x[i : i + 1], activations), together[i : i + 1])
        assert np.array_equal(product(weight, np.ascontiguousarray(x[: i + 1]), activations), together[: i + 1])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activations", [8, 16, 32])
def test_multiply_shows_nan_and_infinity_in_their_row_only(odd: float, activations: Activations) -> None:
    rng = np.random.default_rng(3)
    weight, x = pack(quantized(rng, (8, 64), 4, 32, "float16")), normal(rng, 2, 64)
    x[0, 40] = odd
    out = product(weight, x, activations)
    assert not np.isfinite(out[0]).any()
    assert np.isfinite(out[1]).all()


def test_multiply_takes_zero_large_and_tiny_activations() -> None:
    rng = np.random.default_rng(4)
    source = quantized(rng, (16, 96), 4, 32, "float16")
    weight, expected = pack(source), as_floats(source)
    for size in (0.0, 1e-30, 1e-10, 1e10, 1e30):
        x = normal(rng, 1, 96) * np.float32(size)
        out = product(weight, x, 16)
        assert np.abs(out - x @ expected.T).max() <= 1e-2 * max(size, 1e-37)


def test_rows_returns_the_requested_rows() -> None:
    source = quantized(np.random.default_rng(5), (50, 64), 6, 64, "bfloat16")
    places = np.array([0, 49, 7, 8, 7])
    np.testing.assert_allclose(pack(source).rows(places), as_floats(source)[places], rtol=3e-7, atol=1e-6)


def test_join_weights_stacks_matrices_of_one_format() -> None:
    rng = np.random.default_rng(6)
    parts = [pack(quantized(rng, (size, 64), 4, 32, "float16")) for size in (24, 8, 16)]
    whole = join_weights(parts)
    assert whole is not None
    assert np.array_equal(whole.dequantize(), np.concatenate([part.dequantize() for part in parts]))
    other = pack(quantized(rng, (8, 64), 8, 32, "float16"))
    odd = pack(quantized(rng, (9, 64), 4, 32, "float16"))
    assert join_weights([parts[0], other]) is None
    assert join_weights([odd, parts[0]]) is None


def test_packed_bytes_are_the_bytes_of_the_source() -> None:
    rng = np.random.default_rng(7)
    for bits, group, dtype in FORMATS:
        source = quantized(rng, (16, 128), bits, group, dtype)
        held = sum(array.nbytes for array in pack(source).arrays)
        assert held == source.packed_bytes == sum(array.nbytes for array in source.arrays)


def test_fits_is_false_for_formats_without_tiles() -> None:
    weight = mx.zeros((8, 64))
    codes, scales, *_ = mx.quantize(weight, 16, 4, mode="nvfp4")
    assert not QuantizedMatrix(codes, scales, None, 16, 4, "nvfp4").fits


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="it compiles for another processor of the same kind")
def test_weights_pass_all_tests_without_vnni(tmp_path: Path) -> None:
    env = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CACHE_DIR": str(tmp_path)}
    check = "from kvstrata.packed.cpu import tiles; assert (tiles.DOT, tiles.NUM_INTERLEAVED) == ('', 1)"
    subprocess.run([sys.executable, "-c", check], env=env, check=True)
    subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__], env=env, check=True)


def test_cached_kernels_state_the_digest_of_inlined_modules() -> None:
    for built, parts in (
        (cpu_products, (cpu_vectors, quantized_matrices, cpu_tiles)),
        (cpu_rows, (cpu_vectors,)),
        (cpu_block_kernels, (cpu_vectors, cpu_products, cpu_rows)),
    ):
        texts = [Path(str(module.__file__)).read_bytes() for module in parts]
        expected = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
        assert expected == built.BUILT_ON, f"In {built.__name__} write: BUILT_ON = {expected!r}"
