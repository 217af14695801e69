from __future__ import annotations

import mlx.core as mx
import pytest

from kvstrata.codecs.affine import AffineCodec
from kvstrata.codecs.base import UnsupportedCodec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.registry import from_spec, parse, parse_for
from kvstrata.errors import ConfigError
from tests.codecs.arrays import NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if ":g64" not in name])
def test_codec_names_parse_to_themselves(name: str) -> None:
    assert parse(name).name == name


def test_defaults_are_left_out() -> None:
    assert parse("affine:8:g64") == parse("affine:8") == AffineCodec(8, 64)
    assert parse("affine:8:g64").name == "affine:8"


@pytest.mark.parametrize(
    ("word", "name"), [("f16", "raw"), ("bf16", "raw"), ("q8_0", "planes:8"), ("q4_0", "planes:4")]
)
def test_names_of_llama_cpp_parse(word: str, name: str) -> None:
    assert parse(word) == parse(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "Unknown precision ''"),
        ("int8", "Unknown precision 'int8'"),
        ("planes:8 ", "Unknown precision"),
        ("PLANES:8", "Unknown precision"),
        ("planes", "the bits are missing"),
        ("raw:8", "raw has no bits"),
        ("planes:8:g64", "only affine has groups"),
        ("planes:6", "planes has 8, 4 or 2 bits, not 6"),
        ("rotated:3", "no codec rotated any more. Use planes:4"),
        ("rotated:2", "Use planes:2"),
        ("affine:7", "affine has 8, 6, 5, 4, 3 or 2 bits, not 7"),
        ("affine:8:g16", "groups of 32, 64 or 128, not 16"),
    ],
)
def test_bad_codec_names_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedCodec, match=reason):
        parse(name)


def test_affine_takes_the_group_that_divides() -> None:
    assert parse_for("affine:8", 128) == AffineCodec(8, 64)
    assert parse_for("affine:8", 96) == AffineCodec(8, 32)
    with pytest.raises(UnsupportedCodec, match=r"do not divide head_dim 96\. Use affine:8:g32"):
        parse_for("affine:8:g64", 96)
    with pytest.raises(UnsupportedCodec, match=r"do not divide head_dim 80\. Use planes:8"):
        parse_for("affine:8", 80)


@pytest.mark.parametrize("name", ["planes:2", "planes:8"])
def test_a_head_dim_that_cannot_be_rotated_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedCodec, match="needs a head_dim that 16 divides, not 72"):
        parse_for(name, 72)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({}, "knows no codec None"),
        ({"codec": "vector", "version": 1}, "knows no codec 'vector'"),
        ({"codec": ["raw"], "version": 1}, "knows no codec"),
        ({"codec": "planes", "version": 3, "bits": 8}, "planes of version 1 and 2, not 3"),
        ({"codec": "raw", "version": 2}, "raw of version 1, not 2"),
        ({"codec": "planes", "version": 2, "bits": 8}, "version 2 cannot be read: a RoPE rotation has"),
        ({"codec": "planes", "version": 1}, "'bits' as a whole number, not None"),
        ({"codec": "planes", "version": 1, "bits": 8.0}, "'bits' as a whole number, not 8.0"),
        ({"codec": "affine", "version": 1, "bits": 8}, "'group' as a whole number"),
        ({"codec": "planes", "version": 1, "bits": 3}, "8, 4 or 2 bits, not 3"),
    ],
)
def test_specs_of_other_versions_are_refused(spec: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedCodec, match=reason):
        from_spec(spec)


def test_refusals_are_errors_of_configuration() -> None:
    assert issubclass(UnsupportedCodec, ConfigError)
    assert from_spec({"codec": "raw", "version": 1}) == RawCodec()
    assert PlanesCodec(8).bits_per_value(128) == 8.1875


def test_tuples_of_mlx_lm_are_adopted_and_yielded_as_they_are() -> None:
    x = mx.random.normal((1, 2, 30, 128), key=mx.random.key(0)).astype(mx.bfloat16)
    theirs = mx.quantize(x, group_size=32, bits=6)
    codec = AffineCodec(6, 32)
    planes = codec.adopt(*theirs, position=5)
    assert all(a is b for a, b in zip(codec.yield_tuple(planes), theirs, strict=True))
    dense = mx.dequantize(*theirs, group_size=32, bits=6)
    assert bool(mx.allclose(codec.decode(planes, mx.bfloat16), dense, atol=0.02))
    piece = planes.cut(3, 20)
    assert (piece.position, piece.arrays["scales"].dtype) == (8, mx.bfloat16)
