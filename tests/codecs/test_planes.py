"""Stepping down and back, the three ways to read planes, and what centring is worth."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs import backends
from kvstrata.codecs.base import UnsupportedCodec
from kvstrata.codecs.cpu import planes as cpu_planes
from kvstrata.codecs.mean_runs import runs_of
from kvstrata.codecs.planes import HELD, PlanesCodec, step_down
from kvstrata.codecs.registry import parse
from kvstrata.codecs.rope import RopeMeans
from tests.codecs.arrays import HEAD_DIMS, allocated, keys, rms_error, same_bits

pytestmark = pytest.mark.usefixtures("no_garbage")

STEPS = [(8, 4), (8, 2), (4, 2)]

needs_kernels = pytest.mark.skipif(
    backends.runtime().backend != "cpu", reason="a CPU with numba has kernels to compare"
)


@pytest.mark.parametrize(("high", "low"), STEPS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_step_down_keeps_the_remaining_arrays(high: int, low: int, dim: int) -> None:
    planes = PlanesCodec(high).encode(keys(2, 300, dim), position=77)
    kept = step_down(planes, low)
    assert kept.name == f"planes:{low}"
    assert kept.where() == planes.where()
    assert all(kept.arrays[name] is planes.arrays[name] for name in kept.arrays)
    direct = PlanesCodec(low).encode(keys(2, 300, dim), position=77)
    assert rms_error(PlanesCodec(low).decode(kept, mx.float32), PlanesCodec(low).decode(direct, mx.float32)) < 1e-6


def test_step_down_frees_the_bytes_of_dropped_planes() -> None:
    planes = PlanesCodec(8).encode(keys(8, 2048, 128))
    before = allocated()
    expected = planes.arrays["low"].nbytes
    planes = step_down(planes, 4)
    assert abs(before - allocated() - expected) <= 0.02 * expected


def test_step_down_refuses_other_codecs_and_more_bits() -> None:
    four = step_down(PlanesCodec(8).encode(keys(2, 300, 64)), 4)
    two = step_down(four, 2)
    for bits in (8, 5, 0):
        with pytest.raises(UnsupportedCodec, match="steps down to 2, not"):
            step_down(four, bits)
    with pytest.raises(UnsupportedCodec, match="nothing"):
        step_down(two, 2)
    raw = parse("raw")
    with pytest.raises(UnsupportedCodec, match="no planes to drop"):
        step_down(raw.encode(keys(2, 3, 64)), 4)


@pytest.mark.parametrize("bits", HELD)
@pytest.mark.parametrize("dim", [dim for dim in HEAD_DIMS if dim % 32 == 0])
def test_packed_products_equal_products_with_decoded_planes(bits: int, dim: int) -> None:
    codec = PlanesCodec(bits)
    planes = codec.encode(keys(2, 301, dim), position=200)
    q = mx.random.normal((2, 3, dim), key=mx.random.key(1))
    p = mx.softmax(mx.random.normal((2, 3, 301), key=mx.random.key(2)), axis=-1)
    dense = codec.decode_stock(planes)
    assert rms_error(codec.scores_packed(q, planes), q @ dense.swapaxes(-1, -2)) < 2e-5
    assert rms_error(codec.mix_packed(p, planes), p @ dense) < 2e-5


def test_packed_products_need_groups_of_32() -> None:
    planes = PlanesCodec(8).encode(keys(2, 3, 80))
    with pytest.raises(UnsupportedCodec, match="32 divides, not 80"):
        PlanesCodec(8).scores_packed(keys(2, 1, 80), planes)


def plain_means(arrays: dict[str, mx.array], position: int, num_tokens: int) -> RopeMeans:
    return RopeMeans(arrays["means"].astype(mx.float32), runs_of(position, num_tokens), position, None)


@needs_kernels
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_cpu_kernels_encode_as_stock_operations_do(dim: int) -> None:
    x = keys(2, 301, dim)
    ours, stock = cpu_planes.encode_planes(x, 100, None), PlanesCodec(8).encode_stock(x, 100)
    # A sum in another order may round a scale or a mean to its neighbour in float16.
    assert rms_error(ours["scales"], stock["scales"]) < 1e-4
    assert rms_error(ours["means"], stock["means"]) < 1e-4
    for bits in HELD:
        a, b = (cpu_planes.decode_planes(arrays, bits, plain_means(arrays, 100, 301)) for arrays in (ours, stock))
        assert float(mx.mean(mx.abs(a - b) > 1e-4)) < 0.02
    planes = PlanesCodec(8).encode(x, 100)
    assert rms_error(PlanesCodec(8).decode(planes, mx.float32), PlanesCodec(8).decode_stock(planes)) < 1e-6


@needs_kernels
@pytest.mark.parametrize("odd", [False, True])
def test_cpu_kernels_encode_large_arrays_as_single_rows(odd: bool) -> None:
    x = keys(20, 600, 64)
    if odd:
        x[7, 300, 5] = float("nan")
    assert x.size >= cpu_planes.PARALLEL_VALUES > x.size // 20
    whole = cpu_planes.encode_planes(x, 100, None)
    # Where something is odd, all rows get their means from another sum.
    for row in [7] if odd else range(x.shape[0]):
        alone = cpu_planes.encode_planes(x[row : row + 1], 100, None)
        assert all(same_bits(whole[name][row : row + 1], array) for name, array in alone.items())


@needs_kernels
def test_cpu_kernels_encode_a_range_of_a_buffer_in_place() -> None:
    buffer = keys(3, 700, 128)
    ours = cpu_planes.encode_planes(buffer[:, 4:396], 4, None)
    copied = cpu_planes.encode_planes(mx.array(np.array(buffer)[:, 4:396]), 4, None)
    assert all(same_bits(ours[name], copied[name]) for name in copied)


def test_cut_piece_keeps_the_mean_of_its_group() -> None:
    codec = PlanesCodec(4)
    planes = codec.encode(keys(2, 700, 64), position=200)
    assert planes.mean_runs == (56, 256, 256, 132)
    piece = planes.cut(100, 320)
    assert piece.mean_runs == (212, 8)
    assert same_bits(piece.arrays["means"], planes.arrays["means"][:, 1:3])


def test_join_keeps_means_of_pieces_encoded_apart() -> None:
    codec = PlanesCodec(4)
    joined = codec.join(codec.encode(keys(2, 100, 64)), codec.encode(keys(2, 200, 64, seed=1), 100))
    assert joined.mean_runs == (100, 156, 44)


def test_golden_planes_of_version_1_decode_unchanged() -> None:
    """The format, from bytes written down: version 1 must read them like this for ever."""
    words = {"top": [0xE4E4E4E4], "next": [0x1B1B1B1B], "low": [0x76543210, 0xFEDCBA98]}
    arrays = {name: mx.array([value], mx.uint32) for name, value in words.items()}
    arrays |= {"scales": mx.array([[2.0]], mx.float16), "means": mx.array([[0.5] * 16], mx.float16)}
    codes = np.array([(d % 4) * 64 + (3 - d % 4) * 16 + d for d in range(16)])
    rotated = ((codes + 0.5) / 128 - 1) * 2
    hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]) / 4
    signs = np.array([1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, -1, -1, 1, 1, -1])
    found = parse("planes:8")
    np.testing.assert_allclose(
        np.asarray(found.decode(_planes(arrays), mx.float32))[0], hadamard @ rotated * signs + 0.5, atol=1e-5
    )


def _planes(arrays: dict[str, mx.array]):
    from kvstrata.codecs.registry import encoded_from

    where = {"position": 0, "num_tokens": 1, "dim": 16, "segments": [1]}
    return encoded_from({"codec": "planes", "version": 1, "bits": 8}, where, arrays)
