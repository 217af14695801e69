"""Planes and raw vectors to one array by the portable kernel, run lane by lane in C++, beside MLX's own operations."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.codecs import backends
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.metal import planes as metal_planes
from kvstrata.codecs.metal.planes import TokenRange
from kvstrata.codecs.planes import PlanesCodec
from tests.attention.plain_kernels import COMPILER, Plain
from tests.codecs.arrays import ROTATIONS, keys, some_rotation

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

HEADS = 2


def planes(
    bits: int, num_tokens: int, seed: int, position: int = 0, rotation: str | None = None, dim: int = 64
) -> EncodedArray:
    with backends.as_on_metal():
        codec = PlanesCodec(bits, some_rotation(rotation, dim) if rotation else None)
        return codec.encode(keys(HEADS, num_tokens, dim, seed=seed), position)


def stock(stretches: Sequence[TokenRange], dtype: mx.Dtype = mx.float32) -> np.ndarray:
    """One by one, by MLX's operations."""
    found = []
    for held, start, end in stretches:
        if isinstance(held, EncodedArray):
            assert isinstance(held.codec, PlanesCodec)
            with backends.as_on_metal():
                found.append(held.codec.decode_by_mlx(held.view(start, end), dtype))
        else:
            found.append(held[:, start:end])
    return np.array(mx.concatenate(found, axis=1).astype(mx.float32))


def check(stretches: Sequence[TokenRange], dtype: mx.Dtype = mx.float32, num_launches: int = 1) -> None:
    run = Plain()
    assert metal_planes.takes_ranges(stretches, dtype)
    found = metal_planes.join(stretches, dtype, "plain", run)
    assert found.dtype == dtype
    wanted = stock(stretches, dtype)
    step = {mx.float32: 0, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}[dtype]
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), wanted, rtol=step, atol=1e-4)
    assert len(run.launches) == num_launches


def test_join_of_five_chat_turns_and_own_tokens_is_one_launch() -> None:
    """Whole and cut, of all bits, with RoPE-aware means and plain ones, which older segments have."""
    cases = ((8, "halves"), (4, "halves"), (2, None), (8, None), (8, "halves"))
    coded = [
        TokenRange(planes(bits, 300 - 17 * i, i, 90 * i, rotation), 5 * i, 300 - 20 * i)
        for i, (bits, rotation) in enumerate(cases)
    ]
    own = TokenRange(keys(HEADS, 80, 64, seed=20), 0, 71)
    check([*coded, own])
    check(coded)
    check([coded[0], own])


def test_join_of_more_ranges_than_slots_takes_several_launches() -> None:
    """Then raw ones are not copied by a launch first."""
    coded = [TokenRange(planes(8, 40 + i, i), 0, 40) for i in range(7)]
    raw = [TokenRange(keys(HEADS, 20 + i, 64, seed=i), 2, 9 + i) for i in range(4)]
    check([*coded, raw[0]], num_launches=2)
    check([coded[0], *raw], num_launches=1)
    check([coded[0], raw[0], *coded[1:], raw[1]], num_launches=3)


def test_unused_slots_compile_no_further_kernel() -> None:
    """Whatever fills the places that are left."""
    own, run = TokenRange(keys(HEADS, 20, 64), 0, 20), Plain()
    for stretches in ([TokenRange(planes(2, 20, 1), 0, 20)], [TokenRange(planes(8, 20, 1), 0, 20), own]):
        metal_planes.join(stretches, mx.float32, "plain", run)
    assert len({(launch.text, tuple(array.dtype for array in launch.inputs)) for launch in run.launches}) == 1


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_join_to_16_bits_keeps_raw_vectors(dtype: mx.Dtype) -> None:
    """Raw vectors come through as they are."""
    own = TokenRange(keys(HEADS, 70, 64, seed=3, dtype=dtype), 3, 65)
    check([TokenRange(planes(4, 100, 1, rotation="neighbours"), 0, 100), own], dtype)
    joined = metal_planes.join([TokenRange(planes(2, 8, 1), 0, 8), own], dtype, "plain", Plain())
    assert mx.array_equal(joined[:, 8:], own.held[:, 3:65])  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(("dim", "rotation"), [(80, "last"), (192, "halves"), (256, "neighbours")])
def test_join_takes_each_head_size(dim: int, rotation: str) -> None:
    check([TokenRange(planes(8, 90, 1, 200, rotation, dim), 1, 88), TokenRange(keys(HEADS, 12, dim), 0, 12)])


STRETCHES = st.tuples(
    st.sampled_from([8, 4, 2, 0]), st.integers(4, 400), st.integers(0, 600), st.integers(0, 60), st.integers(0, 60)
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases=st.lists(STRETCHES, min_size=1, max_size=9), rotation=st.sampled_from([None, *ROTATIONS]))
def test_join_of_random_ranges_equals_stock_decoding(
    cases: list[tuple[int, int, int, int, int]], rotation: str | None
) -> None:
    stretches = []
    for seed, (bits, num_tokens, position, before, after) in enumerate(cases):
        size = before + num_tokens + after
        held = planes(bits, size, seed, position, rotation) if bits else keys(HEADS, size, 64, seed=seed)
        stretches.append(TokenRange(held, before, before + num_tokens))
    found = metal_planes.join(stretches, mx.float32, "plain", Plain())
    np.testing.assert_allclose(np.array(found), stock(stretches), rtol=0, atol=1e-4)


def test_lane_order_does_not_change_results() -> None:
    stretches = [TokenRange(planes(8, 100, 1, rotation="halves"), 3, 90), TokenRange(keys(HEADS, 30, 64), 0, 30)]
    forth, back = (metal_planes.join(stretches, mx.float32, "plain", Plain(backwards=way)) for way in (False, True))
    assert mx.array_equal(forth, back)


def test_unsupported_vectors_are_not_taken() -> None:
    coded, raw = TokenRange(planes(4, 20, 1, rotation="halves"), 0, 20), TokenRange(keys(HEADS, 20, 64), 0, 20)
    assert metal_planes.takes_ranges([coded, raw], mx.float32)
    # Raw vectors of another type or size; keys that rotation in two ways; what the kernel does not know.
    assert not metal_planes.takes_ranges([coded, raw], mx.bfloat16)
    assert not metal_planes.takes_ranges([coded, TokenRange(keys(HEADS, 20, 80), 0, 20)], mx.float32)
    assert not metal_planes.takes_ranges([coded, TokenRange(planes(4, 20, 1, rotation="last"), 0, 20)], mx.float32)
    assert not metal_planes.takes_ranges([TokenRange(keys(HEADS, 20, 288), 0, 20)], mx.float32)
    assert not metal_planes.takes_ranges([TokenRange(keys(HEADS, 20, 72), 0, 20)], mx.float32)
    with backends.as_on_metal():
        few = PlanesCodec(4).encode(keys(1, 4, 64))
    assert not metal_planes.takes_ranges([TokenRange(few, 0, 4)], mx.float32)
