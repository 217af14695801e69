"""Kernels for planes are compiled or tried at the start, for every vector of the layers and every precision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import mlx.core as mx
import pytest

from kvstrata.codecs import backends, trials
from kvstrata.codecs.backends import Trial, VectorKind
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.trials import What
from kvstrata.engine import profiling
from kvstrata.kv.layout import LayerSpec, Layout


def test_warm_up_on_cuda_encodes_and_decodes_each_vector_once(monkeypatch: pytest.MonkeyPatch) -> None:
    full = LayerSpec("full", kv_heads=2, k_dim=64, v_dim=128, dtype=mx.float16)
    layout = Layout((full, full, LayerSpec("window", max_size=8, kv_heads=2, k_dim=64, v_dim=64, dtype=mx.float16)))
    decoded: list[tuple[int, int, bool]] = []
    decode = PlanesCodec.decode

    def recording_decode(codec: PlanesCodec, planes: object, dtype: mx.Dtype) -> mx.array:
        decoded.append((codec.bits, planes.dim, dtype == mx.float32))  # pyright: ignore[reportAttributeAccessIssue]
        return decode(codec, planes, dtype)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(PlanesCodec, "decode", recording_decode)
    monkeypatch.setattr(profiling, "runtime", lambda: SimpleNamespace(backend="cuda"))
    assert profiling.warm_up_kernels(layout) == 6
    # Keys are also decoded to float32.
    vectors = ((64, False), (64, True), (128, False))
    assert sorted(decoded) == [(bits, *kind) for bits in (2, 4, 8) for kind in vectors]


def test_warm_up_skips_vectors_that_planes_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "runtime", lambda: SimpleNamespace(backend="cuda"))
    assert profiling.warm_up_kernels(Layout((LayerSpec("full", kv_heads=2, k_dim=20, v_dim=64),))) == 3


def test_warm_up_on_metal_tries_each_vector_with_its_decoded_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(
        (
            LayerSpec("full", kv_heads=2, k_dim=64, v_dim=128, dtype=mx.float16),
            LayerSpec("full", kv_heads=2, k_dim=72, v_dim=128, dtype=mx.float16),  # the kernels do not support 72
        )
    )
    tried: set[tuple[What, VectorKind]] = set()

    def trial(what: What, kind: VectorKind, _: PlanesCodec) -> Trial:
        tried.add((what, kind))
        return Trial(what, 0.0, 1.0)

    monkeypatch.setattr(trials, "trial", trial)
    assert profiling.warm_up_kernels(layout) == 0
    with backends.as_on_metal():
        assert profiling.warm_up_kernels(layout) == 0  # this machine has no Apple GPU
        monkeypatch.setattr(trials, "dialect", lambda: "metal")
        assert profiling.warm_up_kernels(layout) == 3
    halves = {(what, VectorKind(mx.float16, dim)) for what in get_args(What) for dim in (64, 128)}
    assert tried == halves | {("decode", VectorKind(mx.float32, 64))}
