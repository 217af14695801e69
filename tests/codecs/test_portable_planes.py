"""Planes by the portable kernels, run lane by lane in C++, beside MLX's own operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs import backends
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.mean_runs import runs_of
from kvstrata.codecs.metal import planes as metal_planes
from kvstrata.codecs.planes import CODE_PLANES, HELD, PlanesCodec, unpack
from tests.attention.plain_kernels import COMPILER, Plain
from tests.codecs.arrays import ROTATIONS, keys, some_rotation

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

HEADS, TOKENS, POSITION = 2, 300, 200
CASES = [(64, 8, None), (64, 4, "halves"), (128, 2, "neighbours"), (80, 8, "last"), (192, 4, None), (256, 8, "halves")]


def _codec(dim: int, bits: int, rotation: str | None) -> PlanesCodec:
    return PlanesCodec(bits, some_rotation(rotation, dim) if rotation else None)


def _encoded(x: mx.array, codec: PlanesCodec, position: int = POSITION) -> EncodedArray:
    arrays = metal_planes.encode(x, codec.bits, position, codec.rotation, "plain", Plain())
    return EncodedArray(codec, arrays, x.shape[-2], position, x.shape[-1], runs_of(position, x.shape[-2]))


def _code(planes: EncodedArray) -> np.ndarray:
    """All planes as one number for each value."""
    code = np.zeros(1, np.int64)
    for name in HELD[planes.codec.bits]:  # pyright: ignore[reportAttributeAccessIssue]
        bits = CODE_PLANES[name].bits
        code = code * 2**bits + np.array(unpack(planes.arrays[name], bits)).astype(np.int64)
    return code


def _close(found: mx.array, wanted: mx.array, steps: float) -> bool:
    """Within so many steps of float16."""
    a, b = (np.array(x.astype(mx.float32)) for x in (found, wanted))
    return bool((np.abs(a - b) <= steps * (2.0**-10 * np.abs(b) + 1e-6)).all())


@pytest.mark.parametrize(("dim", "bits", "rotation"), CASES)
def test_portable_codes_equal_stock_codes(dim: int, bits: int, rotation: str | None) -> None:
    codec = _codec(dim, bits, rotation)
    x = keys(HEADS, TOKENS, dim)
    found = _encoded(x, codec)
    with backends.as_on_metal():
        wanted = codec.encode(x, POSITION)
    assert _close(found.arrays["means"], wanted.arrays["means"], 1.1)
    # A mean that is rounded to its neighbour moves what is left of a vector a little.
    assert _close(found.arrays["scales"], wanted.arrays["scales"], 16)
    difference = np.abs(_code(found) - _code(wanted))
    assert difference.max() <= 2
    assert (difference > 0).mean() < 0.03


def test_portable_encoding_of_odd_values_equals_stock_encoding() -> None:
    """NaN is stored as 0, what float16 cannot hold as its largest number, and neither moves the others' mean."""
    dim = 64
    x = keys(HEADS, 40, dim, dtype=mx.bfloat16)
    x[0, 3, 5], x[1, 7, 2], x[1, 8, 2] = float("nan"), float("inf"), -3e38
    codec = PlanesCodec(8)
    found = _encoded(x, codec, 0)
    with backends.as_on_metal():
        wanted = codec.encode(x, 0)
        decoded = np.array(codec.decode(wanted, mx.float32))
    assert _close(found.arrays["means"], wanted.arrays["means"], 1.1)
    ours = np.array(metal_planes.decode(found, mx.float32, "plain", Plain()))
    assert np.isfinite(ours).all()
    scales = np.array(wanted.arrays["scales"].astype(mx.float32))
    assert (np.abs(ours - decoded) <= scales * 0.1 + 0.02).all()


def test_constant_vectors_decode_exactly() -> None:
    x = mx.ones((1, 20, 64)) * 3
    planes = _encoded(x, PlanesCodec(4), 0)
    assert mx.array_equal(metal_planes.decode(planes, mx.float32, "plain", Plain()), x)


def test_lane_order_does_not_change_results() -> None:
    codec = _codec(64, 4, "halves")
    x = keys(HEADS, TOKENS, 64)
    forth, back = (
        metal_planes.encode(x, 4, POSITION, codec.rotation, "plain", Plain(backwards=way)) for way in (False, True)
    )
    assert all(mx.array_equal(forth[name], back[name]) for name in forth)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_planes_joined_inside_a_group_decode_as_stock(rotation: str) -> None:
    codec = _codec(64, 4, rotation)
    with backends.as_on_metal():
        joined = codec.join(
            codec.encode(keys(HEADS, 100, 64, seed=1), 30), codec.encode(keys(HEADS, 250, 64, seed=2), 130)
        )
        wanted = np.array(codec.decode(joined, mx.float32))
    found = np.array(metal_planes.decode(joined, mx.float32, "plain", Plain()))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_unsupported_vectors_are_not_taken() -> None:
    assert metal_planes.takes(keys(HEADS, 4, 64))
    assert not metal_planes.takes(keys(1, 4, 64))
    assert not metal_planes.takes(keys(HEADS, 4, 72))
    assert not metal_planes.takes(keys(HEADS, 4, 512))
    with backends.as_on_metal():
        assert not metal_planes.takes_encoded(PlanesCodec(4).encode(keys(1, 4, 64)), mx.float32)
        assert metal_planes.takes_encoded(PlanesCodec(4).encode(keys(2, 4, 64)), mx.float32)
