"""Kernels for planes are compiled at the start: every kind of vector under every precision."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from kvstrata.codecs.planes import PlanesCodec
from kvstrata.engine import warm_up
from kvstrata.layers.kinds import LayerSpec, Layout


def test_every_kind_is_encoded_and_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    full = LayerSpec("full", kv_heads=2, k_dim=64, v_dim=128, dtype=mx.float16)
    layout = Layout((full, full, LayerSpec("window", max_size=8, kv_heads=2, k_dim=64, v_dim=64, dtype=mx.float16)))
    monkeypatch.setattr(warm_up, "paths", SimpleNamespace(active=lambda: "metal"))
    assert warm_up.compile_planes(layout) == 0
    decoded: list[tuple[int, int, bool]] = []
    decode = PlanesCodec.decode

    def watched(codec: PlanesCodec, planes: object, dtype: mx.Dtype) -> mx.array:
        decoded.append((codec.bits, planes.dim, dtype == mx.float32))  # pyright: ignore[reportAttributeAccessIssue]
        return decode(codec, planes, dtype)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(PlanesCodec, "decode", watched)
    monkeypatch.setattr(warm_up, "paths", SimpleNamespace(active=lambda: "cuda"))
    assert warm_up.compile_planes(layout) == 6
    # Keys to float32 too.
    kinds = ((64, False), (64, True), (128, False))
    assert sorted(decoded) == [(bits, *kind) for bits in (2, 4, 8) for kind in kinds]


def test_what_planes_cannot_store_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "paths", SimpleNamespace(active=lambda: "cuda"))
    assert warm_up.compile_planes(Layout((LayerSpec("full", kv_heads=2, k_dim=20, v_dim=64),))) == 3
