"""Codecs of each layer by a precision plan, and refused plans."""

from __future__ import annotations

import pytest

from kvstrata.codecs.base import UnsupportedCodec
from kvstrata.codecs.registry import parse
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.precision_plan import RAW, make_plan, raw_plan


def full(dim: int = 64, v_dim: int | None = None) -> LayerSpec:
    return LayerSpec("full", kv_heads=2, k_dim=dim, v_dim=v_dim or dim)


def names(layout: Layout, *args: str) -> list[str]:
    plan = make_plan(layout, *map(parse, args))
    return [f"{k.name}/{v.name}" for k, v in plan.pairs]


def test_plan_gives_every_layer_the_same_codecs() -> None:
    assert names(Layout((full(),) * 3), "planes:4", "planes:2") == ["planes:4/planes:2"] * 3


def test_plan_encodes_only_layers_with_keys() -> None:
    recurrent = LayerSpec("recurrent", num_arrays=2, state_bytes=10)
    window = LayerSpec("window", max_size=8, kv_heads=2, k_dim=64, v_dim=64)
    composite = LayerSpec("composite", children=(recurrent, full()))
    layout = Layout((recurrent, window, full(), composite, recurrent))
    plan = make_plan(layout, parse("planes:4"), parse("planes:4"))
    assert [pair[0].name for pair in plan.pairs] == ["raw", "planes:4", "planes:4", "raw", "planes:4", "raw"]
    assert plan.pairs[0] == RAW
    assert not plan.is_raw
    assert raw_plan(layout).is_raw
    assert make_plan(layout, parse("raw"), parse("raw")).is_raw


def test_keys_and_values_of_different_dims_have_their_own_groups() -> None:
    assert names(Layout((full(96, 64),)), "affine:4", "affine:4") == ["affine:4:g32/affine:4"]


@pytest.mark.parametrize(
    ("k", "v", "match"),
    [
        ("affine:4", "planes:4", "do not divide head_dim 80"),
        ("planes:4", "affine:8:g128", "do not divide head_dim 80"),
        ("planes:3", "planes:4", "8, 4 or 2 bits"),
        ("rotated:4", "planes:4", "Use planes:4"),
        ("planes:4", "zip:4", "Unknown precision"),
        ("raw:4", "planes:4", "raw has no bits"),
    ],
)
def test_make_plan_refuses_a_codec_that_a_layer_cannot_use(k: str, v: str, match: str) -> None:
    with pytest.raises(UnsupportedCodec, match=match):
        make_plan(Layout((full(80),)), parse(k), parse(v))
