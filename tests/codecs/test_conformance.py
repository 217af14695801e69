"""What every codec promises, for every head_dim that it takes."""

from __future__ import annotations

import json
import math

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.codecs.base import Codec, EncodedArray, MismatchedArrays, UnsupportedCodec
from kvstrata.codecs.registry import encoded_from, from_spec, parse
from tests.codecs.arrays import HEAD_DIMS, NAMES, TURNING, allocated, keys, named, rms_error, same_bits

pytestmark = pytest.mark.usefixtures("no_garbage")

# Root mean square error relative to the size of the keys. planes: a uniform step of scale / 2**(bits - 1), over
# sqrt(12), with a largest value of 3.4 standard deviations; affine: what groups with an
# outlier cost.
ERROR = {
    "raw": {16: 0.0},
    "affine": {8: 0.012, 6: 0.045, 5: 0.09, 4: 0.18, 3: 0.35, 2: 0.65},
    "planes": {8: 0.0077, 4: 0.123, 2: 0.49},
}


def takes(name: str, dim: int) -> bool:
    try:
        parse(name).check(dim)
    except UnsupportedCodec:
        return False
    return True


CASES = [pytest.param(parse(name), dim, id=f"{name}-{dim}") for name in NAMES for dim in HEAD_DIMS if takes(name, dim)]
TURNING_CASES = [pytest.param(named(name, dim), dim, id=f"{name}-{dim}") for name in TURNING for dim in (64, 80, 256)]
EVERY_CODEC = [pytest.param(named(name, 64), id=name) for name in (*NAMES, *TURNING)]
codecs = st.sampled_from([named(name, 64) for name in (*NAMES, *TURNING)])


def bound(codec: Codec) -> float:
    return ERROR[codec.spec()["codec"]][codec.spec().get("bits", 16)]


def reload(planes: EncodedArray) -> EncodedArray:
    spec, where = json.loads(json.dumps([planes.spec, planes.where()]))
    return encoded_from(spec, where, planes.arrays)


def assert_same(a: EncodedArray, b: EncodedArray) -> None:
    assert (a.codec, a.where()) == (b.codec, b.where())
    for name, array in a.arrays.items():
        assert same_bits(array, b.arrays[name]), name


def test_affine_refuses_head_dims_that_no_group_divides() -> None:
    refused = {(name, dim) for name in NAMES for dim in HEAD_DIMS if not takes(name, dim)}
    assert {name.split(":")[0] for name, _ in refused} == {"affine"}
    assert {dim for name, dim in refused if name in ("affine:8:g32", "affine:4:g32")} == {80}


@pytest.mark.parametrize(("codec", "dim"), CASES)
def test_round_trip_error_is_within_the_bound_of_the_bits(codec: Codec, dim: int) -> None:
    x = keys(2, 3, 300, dim)
    assert rms_error(codec.decode(codec.encode(x), mx.float32), x) <= bound(codec)


@pytest.mark.parametrize(("codec", "dim"), CASES + TURNING_CASES)
@pytest.mark.parametrize("queries", [1, 4, 40])
def test_scores_and_mixes_equal_products_with_decoded_vectors(codec: Codec, dim: int, queries: int) -> None:
    planes = codec.encode(keys(2, 301, dim), position=130)
    dense = codec.decode(planes, mx.float32)
    q = mx.random.normal((2, queries, dim), key=mx.random.key(1))
    p = mx.softmax(mx.random.normal((2, queries, 301), key=mx.random.key(2)), axis=-1)
    assert rms_error(codec.scores(q, planes), q @ dense.swapaxes(-1, -2)) < 2e-5
    assert rms_error(codec.mix(p, planes), p @ dense) < 2e-5
    assert codec.scores(q, planes).shape == (2, queries, 301)


@pytest.mark.parametrize("codec", EVERY_CODEC)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_codec_encodes_and_decodes_each_dtype(codec: Codec, dtype: mx.Dtype) -> None:
    x = keys(2, 70, 128, dtype=dtype)
    planes = codec.encode(x)
    decoded = codec.decode(planes, dtype)
    assert decoded.dtype == dtype
    assert rms_error(decoded, x) <= bound(codec) + (0.003 if dtype == mx.bfloat16 and codec.name != "raw" else 0.001)
    assert codec.scores(x, planes).dtype == mx.float32
    assert codec.mix(mx.ones((2, 1, 70), dtype), planes).dtype == mx.float32
    if codec.name == "raw":
        assert same_bits(decoded, x)


@settings(max_examples=60)
@given(codec=codecs, num_tokens=st.integers(1, 600), position=st.integers(0, 600), where=st.data())
def test_cut_pieces_decode_to_slices_and_rejoin_unchanged(
    codec: Codec, num_tokens: int, position: int, where: st.DataObject
) -> None:
    start = where.draw(st.integers(0, num_tokens - 1))
    end = where.draw(st.integers(start + 1, num_tokens))
    planes = codec.encode(keys(2, num_tokens, 128), position)
    piece = planes.cut(start, end)
    assert (piece.position, piece.num_tokens) == (position + start, end - start)
    assert same_bits(codec.decode(piece, mx.float32), codec.decode(planes, mx.float32)[:, start:end])
    if start:
        piece = codec.join(planes.cut(0, start), piece)
    if end < num_tokens:
        piece = codec.join(piece, planes.cut(end, num_tokens))
    assert_same(piece, planes)


@settings(max_examples=40)
@given(codec=codecs, first=st.integers(1, 400), second=st.integers(1, 400), position=st.integers(0, 300))
def test_join_of_arrays_encoded_apart_changes_no_code(codec: Codec, first: int, second: int, position: int) -> None:
    a = codec.encode(keys(2, first, 128, seed=1), position)
    b = codec.encode(keys(2, second, 128, seed=2) + 3, position + first)
    joined = codec.join(a, b)
    both = mx.concatenate([codec.decode(a, mx.float32), codec.decode(b, mx.float32)], axis=-2)
    assert same_bits(codec.decode(joined, mx.float32), both)
    assert (joined.position, joined.num_tokens) == (position, first + second)
    q = mx.random.normal((2, 3, 128), key=mx.random.key(3))
    assert rms_error(codec.scores(q, joined), q @ both.swapaxes(-1, -2)) < 2e-5
    assert_same(joined.cut(first, first + second), b)


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_spec_survives_json(codec: Codec) -> None:
    assert from_spec(json.loads(json.dumps(codec.spec()))) == codec
    assert parse(codec.name).name == codec.name
    planes = codec.encode(keys(2, 400, 128), 100).cut(30, 333)
    assert_same(reload(planes), planes)


@pytest.mark.parametrize(("codec", "dim"), CASES)
def test_nbytes_equals_allocated_bytes(codec: Codec, dim: int) -> None:
    x = keys(8, 1024, dim)
    before = allocated()
    planes = codec.encode(x)
    assert abs(allocated() - before - planes.nbytes) <= 0.02 * planes.nbytes
    if codec.name != "raw":
        assert planes.nbytes * 8 / x.size == pytest.approx(codec.bits_per_value(dim))


@pytest.mark.parametrize("codec", EVERY_CODEC)
@pytest.mark.parametrize("leading", [(), (8,)])
@pytest.mark.parametrize("kept_tokens", [2000, 16], ids=["most", "few"])
def test_cut_keeps_no_parent_alive(codec: Codec, leading: tuple[int, ...], kept_tokens: int) -> None:
    planes = codec.encode(keys(*leading, 2048, 128))
    before = allocated() - planes.nbytes
    planes = planes.cut(20, 20 + kept_tokens)
    # MLX rounds an allocation up to a few bytes: of a single head's 16 tokens that shows.
    assert abs(allocated() - before - planes.nbytes) <= 0.02 * planes.nbytes + 64


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_nan_and_infinities_do_not_change_other_vectors(codec: Codec) -> None:
    """NaN counts as 0, infinities as +-65504; other vectors do not feel them."""
    if codec.name == "raw":
        pytest.skip("raw keeps every bit: the next test")
    x = keys(2, 260, 128)
    odd = mx.array(x)
    odd[0, 7, 3], odd[0, 9, 5], odd[1, 11, 4] = math.nan, math.inf, -math.inf
    planes = codec.encode(odd)
    decoded = codec.decode(planes, mx.float32)
    assert bool(mx.isfinite(decoded).all())
    assert float(decoded[0, 9, 5]) == pytest.approx(65504, rel=0.35)
    assert float(decoded[1, 11, 4]) == pytest.approx(-65504, rel=0.35)
    usual = mx.array([token for token in range(260) if token not in (7, 9, 11)])
    assert rms_error(decoded[:, usual], x[:, usual]) <= bound(codec) * 1.1
    assert bool(mx.isfinite(codec.scores(x[:, :1], planes)).all())


def test_raw_keeps_every_bit_of_odd_values() -> None:
    codec = parse("raw")
    x = mx.array([[math.nan, math.inf, -math.inf, -0.0, 1e-40, 3e38]])
    assert same_bits(codec.decode(codec.encode(x), mx.float32), x)


@pytest.mark.parametrize(("codec", "dim"), CASES)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_zeros_constants_and_few_tokens_decode_within_bounds(codec: Codec, dim: int, num_tokens: int) -> None:
    zeros = codec.decode(codec.encode(mx.zeros((2, num_tokens, dim))), mx.float32)
    assert bool((zeros == 0).all())
    constant = mx.full((2, num_tokens, dim), -2.5)
    assert rms_error(codec.decode(codec.encode(constant), mx.float32), constant) <= max(bound(codec), 1e-6) * 4
    few = keys(2, num_tokens, dim)
    assert rms_error(codec.decode(codec.encode(few, 255), mx.float32), few) <= bound(codec) * 1.4


@pytest.mark.parametrize("codec", EVERY_CODEC)
@pytest.mark.parametrize("size", [1e-12, 1e-3, 300.0, 4e4])
def test_values_near_the_limits_of_float16_keep_their_precision(codec: Codec, size: float) -> None:
    """Large norms keep their precision as long as each value fits float16; what is far below it may become 0."""
    x = mx.random.normal((2, 100, 128), key=mx.random.key(4)) * (size / 4)
    planes = codec.encode(x)
    decoded = codec.decode(planes, mx.float32)
    limit = {1e-12: 1.01, 1e-3: bound(codec) * 2}.get(size, bound(codec) * 1.5)
    assert rms_error(decoded, x) <= limit


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_mismatched_arguments_are_refused(codec: Codec) -> None:
    planes = codec.encode(keys(2, 20, 128))
    for start, end in ((-1, 5), (3, 3), (5, 4), (0, 21)):
        with pytest.raises(MismatchedArrays, match="cannot be cut"):
            planes.cut(start, end)
    with pytest.raises(MismatchedArrays, match="do not follow"):
        codec.join(planes, planes)
    with pytest.raises(MismatchedArrays, match="cannot be joined"):
        codec.join(planes, codec.encode(keys(3, 20, 128), 20))
    with pytest.raises(MismatchedArrays, match="needs an array of shape"):
        codec.scores(keys(2, 1, 64), planes)
    with pytest.raises(MismatchedArrays, match="needs an array of shape"):
        codec.mix(keys(3, 1, 20), planes)
    with pytest.raises(MismatchedArrays, match="at least one token"):
        codec.encode(mx.zeros((2, 0, 128)))
    with pytest.raises(MismatchedArrays, match=r"not mlx\.core\.int32"):
        codec.encode(mx.zeros((2, 4, 128), mx.int32))
    with pytest.raises(MismatchedArrays, match="position"):
        codec.encode(mx.zeros((2, 4, 128)), -1)


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_damaged_arrays_are_refused(codec: Codec) -> None:
    planes = codec.encode(keys(2, 20, 128))
    for name, array in planes.arrays.items():
        others = {other: kept for other, kept in planes.arrays.items() if other != name}
        with pytest.raises(MismatchedArrays, match="has the planes"):
            encoded_from(planes.spec, planes.where(), others)
        with pytest.raises(MismatchedArrays, match=name):
            encoded_from(planes.spec, planes.where(), {**others, name: array[..., :-1]})
        with pytest.raises(MismatchedArrays, match=name):
            encoded_from(planes.spec, planes.where(), {**others, name: array.astype(mx.int64)})
    with pytest.raises(MismatchedArrays):
        encoded_from(planes.spec, {**planes.where(), "num_tokens": 21}, planes.arrays)
    with pytest.raises(MismatchedArrays, match="num_tokens"):
        encoded_from(planes.spec, {}, planes.arrays)
