"""RoPE-aware means: what they save, and that every way of reading them gives the same keys."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn

from kvstrata.codecs import backends
from kvstrata.codecs.planes import HELD, PlanesCodec, step_down
from kvstrata.codecs.registry import encoded_from
from kvstrata.codecs.rope import RopeRotation, make_rotation, rotation_from
from tests.codecs.arrays import ROTATIONS, keys, rms_error, same_bits, some_rotation


def rotated_keys(
    rotation: RopeRotation, num_tokens: int, position: int, dim: int = 64, bias: float = 30.0, seed: int = 0
) -> mx.array:
    """[2, tokens, dim]: noise around a large constant, after RoPE as MLX does it."""
    rng = np.random.default_rng(seed)
    x = mx.array((rng.normal(size=(2, num_tokens, dim)) + bias * rng.normal(size=(2, 1, dim))).astype(np.float32))
    periods = mx.array(1 / np.frombuffer(rotation.frequencies, "<f4"))
    inner = mx.fast.rope(
        x[None, ..., rotation.first : rotation.end],
        2 * rotation.num_pairs,
        traditional=rotation.is_interleaved,
        base=None,
        scale=1.0,
        offset=position,
        freqs=periods,
    )[0]
    return mx.concatenate([x[..., : rotation.first], inner, x[..., rotation.end :]], axis=-1)


def error(codec: PlanesCodec, x: mx.array, position: int) -> float:
    return float(mx.sqrt(mx.mean((codec.decode(codec.encode(x, position), mx.float32) - x) ** 2)))


@pytest.mark.parametrize("kind", ROTATIONS)
@pytest.mark.parametrize("bits", list(HELD))
@pytest.mark.parametrize("position", [0, 130, 100_000])
def test_rope_means_remove_a_bias_before_rope(kind: str, bits: int, position: int) -> None:
    rotation = some_rotation(kind, 64)
    x = rotated_keys(rotation, 600, position)
    # What is left is noise of size 1: the error is that of noise alone, and a tenth or less of a plain mean's.
    noise = error(PlanesCodec(bits), rotated_keys(rotation, 600, position, bias=0.0), position)
    assert error(PlanesCodec(bits, rotation), x, position) < 1.05 * noise + 0.002
    assert error(PlanesCodec(bits, rotation), x, position) < 0.1 * error(PlanesCodec(bits), x, position)


@pytest.mark.parametrize("kind", ROTATIONS)
def test_rope_means_follow_the_rope_of_mlx(kind: str) -> None:
    """A constant key is stored whole in its mean, so nothing is left to code."""
    rotation = some_rotation(kind, 64)
    x = rotated_keys(rotation, 300, 500)
    constant = rotated_keys(rotation, 300, 500) - rotated_keys(rotation, 300, 500, bias=0.0)
    planes = PlanesCodec(8, rotation).encode(constant, 500)
    largest = float(mx.max(planes.arrays["scales"].astype(mx.float32)))
    assert largest < 0.003 * float(mx.max(mx.abs(constant)))  # what rounding the mean to float16 leaves
    assert rms_error(PlanesCodec(8, rotation).decode(PlanesCodec(8, rotation).encode(x, 500), mx.float32), x) < 0.001


@st.composite
def any_rotation(draw: st.DrawFn, dim: int = 64) -> RopeRotation:
    num_pairs = draw(st.integers(1, dim // 2))
    frequencies = draw(st.lists(st.floats(0, 3, width=32), min_size=num_pairs, max_size=num_pairs))
    first = draw(st.integers(0, dim - 2 * num_pairs))
    return make_rotation(np.array(frequencies, np.float32), first=first, is_interleaved=draw(st.booleans()))


@settings(max_examples=60)
@given(
    rotation=any_rotation(),
    num_tokens=st.integers(1, 700),
    position=st.integers(0, 2000),
    bits=st.sampled_from([8, 4, 2]),
)
def test_rope_planes_of_kernels_and_stock_operations_agree(
    rotation: RopeRotation, num_tokens: int, position: int, bits: int
) -> None:
    codec, x = PlanesCodec(bits, rotation), keys(2, num_tokens, 64)
    q = mx.random.normal((2, 3, 64), key=mx.random.key(1))
    planes = codec.encode(x, position)
    dense, scores = codec.decode(planes, mx.float32), codec.scores(q, planes)
    with backends.as_on_metal():
        assert rms_error(codec.decode(planes, mx.float32), dense) < 1e-6
        assert rms_error(codec.scores(q, planes), scores) < 1e-5
        stock = codec.encode(x, position)
    # A sum in another order may round a mean or a scale to its neighbour in float16, and a few codes with it.
    assert float(mx.mean(mx.abs(codec.decode(stock, mx.float32) - dense) > 0.02)) < 0.02
    assert rms_error(scores, q @ dense.swapaxes(-1, -2)) < 1e-5


@settings(max_examples=40)
@given(
    rotation=any_rotation(), position=st.integers(0, 600), cuts=st.lists(st.integers(1, 699), max_size=4, unique=True)
)
def test_pieces_encoded_apart_are_joined_and_cut_at_any_token(
    rotation: RopeRotation, position: int, cuts: list[int]
) -> None:
    codec, x = PlanesCodec(4, rotation), keys(2, 700, 64)
    q = mx.random.normal((2, 3, 64), key=mx.random.key(1))
    bounds = [0, *sorted(cuts), 700]
    pieces = [codec.encode(x[:, a:b], position + a) for a, b in itertools.pairwise(bounds)]
    expected = mx.concatenate([codec.decode(piece, mx.float32) for piece in pieces], axis=-2)
    joined = pieces[0]
    for piece in pieces[1:]:
        joined = codec.join(joined, piece)
    middle = joined.cut(100, 600)
    with_kernels = codec.decode(joined, mx.float32), codec.scores(q, joined), codec.decode(middle, mx.float32)
    assert same_bits(with_kernels[0], expected)
    assert same_bits(with_kernels[2], expected[:, 100:600])
    with backends.as_on_metal():
        assert rms_error(codec.decode(joined, mx.float32), expected) < 1e-6
        assert rms_error(codec.scores(q, joined), with_kernels[1]) < 1e-5
        assert rms_error(codec.scores(q, middle), with_kernels[1][..., 100:600]) < 1e-5


def test_step_down_keeps_the_rotation() -> None:
    rotation = some_rotation("halves", 64)
    planes = PlanesCodec(8, rotation).encode(rotated_keys(rotation, 300, 7), 7)
    lower = step_down(planes, 4)
    assert lower.codec == PlanesCodec(4, rotation)
    direct = PlanesCodec(4, rotation).encode(rotated_keys(rotation, 300, 7), 7)
    assert all(same_bits(lower.arrays[name], array) for name, array in direct.arrays.items())


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("metal", [False, True])
def test_odd_vector_does_not_change_others(odd: float, metal: bool, request: pytest.FixtureRequest) -> None:
    if metal:
        request.getfixturevalue("as_on_metal")
    rotation = some_rotation("halves", 64)
    x = rotated_keys(rotation, 300, 0)
    usual = PlanesCodec(8, rotation).decode(PlanesCodec(8, rotation).encode(x), mx.float32)
    x[1, 40, 3] = odd
    found = PlanesCodec(8, rotation).decode(PlanesCodec(8, rotation).encode(x), mx.float32)
    assert bool(mx.isfinite(found).all())
    others = [i for i in range(300) if i != 40]
    # Its group has a mean of one vector less, which changes what is left to code.
    assert float(mx.max(mx.abs(found[:, others] - usual[:, others]))) < 0.1


def test_rotation_spec_survives_a_round_trip() -> None:
    for rotation in (
        some_rotation("halves", 64),
        some_rotation("last", 128),
        make_rotation(np.array([0.0, 1.0]), is_interleaved=True),
    ):
        assert rotation_from(rotation.spec()) == rotation


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first": -1}, "does not describe a RoPE rotation"),
        ({"first": True}, "does not describe a RoPE rotation"),
        ({"interleaved": 1}, "does not describe a RoPE rotation"),
        ({"frequencies": [1.0]}, "does not describe a RoPE rotation"),
        ({"frequencies": "not base64!"}, "not base64"),
        ({"frequencies": "AAAA"}, "not float32"),
        ({"frequencies": ""}, "needs frequencies"),
        ({"frequencies": "AADAfw=="}, "all of them finite"),
    ],
)
def test_malformed_rotation_specs_are_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        rotation_from({**some_rotation("halves", 64).spec(), **change})


def test_golden_planes_of_version_2_decode_unchanged() -> None:
    """Two tokens that differ in their place alone, at offsets 255 and 0 of their groups."""
    spec = {"codec": "planes", "version": 2, "bits": 2}
    rotation = {"first": 0, "interleaved": False, "frequencies": "AACAPwAAAD8="}  # 1.0 and 0.5
    words = mx.array([[0xE4E4E4E4], [0xE4E4E4E4]], mx.uint32)
    mean = [1.0, 2.0, 3.0, 4.0, *[0.25] * 12]
    arrays = {"top": words, "scales": mx.zeros((2, 1), mx.float16), "means": mx.array([mean, mean], mx.float16)}
    where = {"position": 255, "num_tokens": 2, "dim": 16, "segments": [1, 1]}
    planes = encoded_from({**spec, "turn": rotation}, where, arrays)
    c, s = np.cos([255 * 1.0, 255 * 0.5]), np.sin([255 * 1.0, 255 * 0.5])
    at_255 = [c[0] - 3 * s[0], 2 * c[1] - 4 * s[1], s[0] + 3 * c[0], 2 * s[1] + 4 * c[1], *[0.25] * 12]
    np.testing.assert_allclose(np.asarray(planes.codec.decode(planes, mx.float32)), [at_255, mean], atol=1e-5)


def test_rotation_equals_rope_of_mlx() -> None:
    """nn.RoPE with the frequencies that its base gives."""
    x = mx.random.normal((1, 1, 9, 32), key=mx.random.key(0))
    rope = nn.RoPE(32, base=500.0)
    rotation = make_rotation(500.0 ** (-np.arange(16) / 16))
    angles = rotation.angles(np.arange(9))
    a, b = np.asarray(x[0, 0, :, :16]), np.asarray(x[0, 0, :, 16:])
    expected = np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1)
    np.testing.assert_allclose(np.asarray(rope(x)[0, 0]), expected, atol=1e-5)
