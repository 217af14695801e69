"""Packed weights hold what MLX's hold, and multiply as float32 does, as far as activations are not rounded."""

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
from kvstrata.packed import quantized as quantized_module
from kvstrata.packed.cpu import block_kernels as cpu_block_kernels
from kvstrata.packed.cpu import products as cpu_products
from kvstrata.packed.cpu import rows as cpu_rows
from kvstrata.packed.cpu import tiles as cpu_tiles
from kvstrata.packed.form import Activations
from kvstrata.packed.quantized import QuantizedMatrix
from kvstrata.packed.weight import BLAS_VECTORS, ActivationVectors, PackedWeight, join_weights, pack
from tests.packed.quantized import FORMATS, as_floats, mxfp4, quantized


def product(weight: PackedWeight, x: np.ndarray, activations: Activations) -> np.ndarray:
    out = np.full((len(x), weight.shape[0]), np.nan, np.float32)
    weight.multiply(ActivationVectors(x, activations), out)
    return out


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("bits", "group", "dtype"), FORMATS)
def test_every_format_holds_what_mlx_holds(bits: int, group: int, dtype: str) -> None:
    source = quantized(np.random.default_rng(bits), (24, 256), bits, group, dtype)
    assert source.fits
    np.testing.assert_allclose(pack(source).unpacked(), as_floats(source), rtol=3e-7, atol=1e-6)


def test_mxfp4_holds_what_mlx_holds() -> None:
    source = mxfp4(np.random.default_rng(0), (16, 96))
    assert source.fits
    assert np.array_equal(pack(source).unpacked(), as_floats(source))


@pytest.mark.parametrize("shift", [-100, -20, 0, 20, 100])
def test_mxfp4_of_any_size(shift: int) -> None:
    """Its scales are powers of two over all of float32's range."""
    source = mxfp4(np.random.default_rng(1), (8, 64))
    scales = (source.scales.astype(mx.int32) + shift).astype(mx.uint8)
    moved = QuantizedMatrix(source.weight, scales, None, 32, 4, "mxfp4")
    assert np.array_equal(pack(moved).unpacked(), as_floats(source) * np.float32(2.0) ** shift)


@given(
    seed=st.integers(0, 1000),
    form=st.sampled_from([*FORMATS, None]),
    num_rows=st.integers(1, 40),
    num_groups=st.integers(1, 3),
    vectors=st.integers(1, 2 * BLAS_VECTORS + 1),
)
def test_products_are_those_of_float32(
    seed: int, form: tuple[int, int, str] | None, num_rows: int, num_groups: int, vectors: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = num_groups * (form[1] if form else 32)
    source = quantized(rng, (num_rows, columns), *form) if form else mxfp4(rng, (num_rows, columns))
    weight, x = pack(source), normal(rng, vectors, columns)
    wanted = x.astype(np.float64) @ as_floats(source).astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(as_floats(source)).astype(np.float64).T
    assert np.all(np.abs(product(weight, x, 32) - wanted) <= 1e-5 * size + 1e-6)
    # The largest of 32 values is 127 steps of 8 bits and 32512 of 16; each is off by half a step at most.
    coded: tuple[tuple[Activations, int], ...] = ((16, 32512), (8, 127))
    for activations, steps in coded:
        rounded = np.abs(x).reshape(vectors, -1, 32).max(-1).repeat(32, -1) / steps / 2
        bound = rounded.astype(np.float64) @ np.abs(as_floats(source)).astype(np.float64).T
        assert np.all(np.abs(product(weight, x, activations) - wanted) <= 1.01 * bound + 1e-5 * size + 1e-6)


@pytest.mark.parametrize("activations", [8, 16, 32])
@pytest.mark.parametrize("bits", [4, 8, 6])
def test_a_vector_has_the_same_product_in_any_company(activations: Activations, bits: int) -> None:
    """So that what a prompt's KV is depends neither on other requests nor on how it is cut into chunks."""
    rng = np.random.default_rng(2)
    weight = pack(quantized(rng, (120, 128), bits, 64, "bfloat16"))
    x = normal(rng, 11, 128)
    together = product(weight, x, activations)
    if activations == 32:
        x = x[:BLAS_VECTORS]  # more of them go by BLAS, which promises no such thing
        together = product(weight, x, activations)
    for i in range(len(x)):
        assert np.array_equal(product(weight, x[i : i + 1], activations), together[i : i + 1])
        assert np.array_equal(product(weight, np.ascontiguousarray(x[: i + 1]), activations), together[: i + 1])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activations", [8, 16, 32])
def test_what_is_no_number_shows(odd: float, activations: Activations) -> None:
    rng = np.random.default_rng(3)
    weight, x = pack(quantized(rng, (8, 64), 4, 32, "float16")), normal(rng, 2, 64)
    x[0, 40] = odd
    made = product(weight, x, activations)
    assert not np.isfinite(made[0]).any()
    assert np.isfinite(made[1]).all()


def test_zeros_and_large_and_tiny_values() -> None:
    rng = np.random.default_rng(4)
    source = quantized(rng, (16, 96), 4, 32, "float16")
    weight, wanted = pack(source), as_floats(source)
    for size in (0.0, 1e-30, 1e-10, 1e10, 1e30):
        x = normal(rng, 1, 96) * np.float32(size)
        made = product(weight, x, 16)
        assert np.abs(made - x @ wanted.T).max() <= 1e-2 * max(size, 1e-37)


def test_rows_of_a_table() -> None:
    source = quantized(np.random.default_rng(5), (50, 64), 6, 64, "bfloat16")
    places = np.array([0, 49, 7, 8, 7])
    np.testing.assert_allclose(pack(source).rows(places), as_floats(source)[places], rtol=3e-7, atol=1e-6)


def test_joined_weights_are_one_below_the_other() -> None:
    rng = np.random.default_rng(6)
    parts = [pack(quantized(rng, (size, 64), 4, 32, "float16")) for size in (24, 8, 16)]
    whole = join_weights(parts)
    assert whole is not None
    assert np.array_equal(whole.unpacked(), np.concatenate([part.unpacked() for part in parts]))
    other = pack(quantized(rng, (8, 64), 8, 32, "float16"))
    odd = pack(quantized(rng, (9, 64), 4, 32, "float16"))
    assert join_weights([parts[0], other]) is None
    assert join_weights([odd, parts[0]]) is None


def test_the_room_that_it_takes_is_that_of_the_file() -> None:
    rng = np.random.default_rng(7)
    for bits, group, dtype in FORMATS:
        source = quantized(rng, (16, 128), bits, group, dtype)
        held = sum(array.nbytes for array in pack(source).arrays)
        assert held == source.packed_bytes == sum(array.nbytes for array in source.arrays)


def test_formats_without_tiles_say_so() -> None:
    weight = mx.zeros((8, 64))
    made = mx.quantize(weight, 16, 4, mode="nvfp4")
    assert not QuantizedMatrix(made[0], made[1], None, 16, 4, "nvfp4").fits


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="it compiles for another processor of the same kind")
def test_a_machine_without_vnni_passes_all_of_these(tmp_path: Path) -> None:
    env = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CACHE_DIR": str(tmp_path)}
    looked = "from kvstrata.packed.cpu import tiles; assert (tiles.DOT, tiles.NUM_ABREAST) == ('', 1)"
    subprocess.run([sys.executable, "-c", looked], env=env, check=True)
    subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__], env=env, check=True)


def test_compiled_code_on_disk_belongs_to_the_modules_that_it_is_made_of() -> None:
    for built, parts in (
        (cpu_products, (cpu_vectors, quantized_module, cpu_tiles)),
        (cpu_rows, (cpu_vectors,)),
        (cpu_block_kernels, (cpu_vectors, cpu_products, cpu_rows)),
    ):
        texts = [Path(str(module.__file__)).read_bytes() for module in parts]
        wanted = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
        assert wanted == built.BUILT_ON, f"In {built.__name__} write: BUILT_ON = {wanted!r}"
