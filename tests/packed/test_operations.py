"""Replaced operations beside those of MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import activations, qwen3_next, switch_layers

from kvstrata.codecs import backends
from kvstrata.packed import operations

pytestmark = pytest.mark.skipif(backends.runtime().backend != "cpu", reason="needs numba, and no GPU")

SIZES = st.integers(1, 3 * operations.MIN_VALUES)


def normal(*shape: int, seed: int = 1) -> mx.array:
    return 4 * mx.random.normal(shape, key=mx.random.key(seed))


def assert_close(ours: mx.array, theirs: mx.array) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-5, atol=1e-6)


@given(SIZES)
@settings(max_examples=20, deadline=None)
def test_silu_and_swiglu_match_mlx(size: int) -> None:
    gate, x = normal(3, size), normal(3, size, seed=2)
    assert_close(operations.silu(x), operations._silu(x))
    assert_close(operations.swiglu(gate, x), activations.swiglu(gate, x))
    assert_close(operations.precise_swiglu(x, gate, x), activations.precise_swiglu(x, gate, x))


def test_silu_keeps_nan_and_matches_mlx_at_extremes() -> None:
    edge = mx.array([0.0, -0.0, 1e-30, 88.0, 1e30, -88.0, -1e30, mx.inf, mx.nan] * 200)
    assert mx.array_equal(mx.isnan(operations.silu(edge)), mx.isnan(operations._silu(edge)))
    number = mx.where(mx.isnan(edge), 0.0, edge)
    assert_close(operations.silu(number), operations._silu(number))


@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 40),
    channels=st.integers(2, 200),
    length=st.integers(1, 5),
    seed=SIZES,
)
@settings(max_examples=40, deadline=None)
def test_conv1d_matches_mlx_if_depthwise(rows: int, tokens: int, channels: int, length: int, seed: int) -> None:
    x, weight = normal(rows, tokens + length - 1, channels, seed=seed), normal(channels, length, 1, seed=seed + 1)
    ours = operations.conv1d(x, weight, 1, 0, 1, channels)
    assert_close(ours, operations._conv1d(x, weight, 1, 0, 1, channels))


@pytest.mark.parametrize(
    ("groups", "options"), [(64, {"padding": 1}), (64, {"stride": 2}), (64, {"dilation": 2}), (1, {}), (8, {})]
)
def test_conv1d_calls_mlx_if_not_plain_and_depthwise(groups: int, options: dict[str, Any]) -> None:
    x, weight = normal(1, 50, 64), normal(64, 3, 64 // groups)
    theirs = operations._conv1d(x, weight, groups=groups, **options)
    assert_close(operations.conv1d(x, weight, groups=groups, **options), theirs)


def test_operations_match_mlx_on_strided_views() -> None:
    x = normal(2, 40, 128)
    assert_close(operations.silu(x[:, ::2]), operations._silu(x[:, ::2]))
    assert_close(operations.swiglu(x[..., :64], x[..., 64:]), activations.swiglu(x[..., :64], x[..., 64:]))
    weight = normal(4, 128).T[..., None]
    assert_close(operations.conv1d(x, weight, groups=128), operations._conv1d(x, weight, groups=128))


def test_operations_leave_inputs_unchanged() -> None:
    x = normal(3, 1000)
    before = np.array(x)
    mx.eval(operations.silu(x), operations.swiglu(x, x))
    assert np.array_equal(np.array(x), before)


def test_operations_call_mlx_while_it_traces() -> None:
    x, weight = normal(1, 50, 64), normal(64, 3, 1)

    @mx.compile
    def traced(x: mx.array) -> mx.array:
        return operations.swiglu(x, operations.silu(x))[:, 2:] + operations.conv1d(x, weight, groups=64)

    theirs = activations.swiglu(x, operations._silu(x))[:, 2:] + operations._conv1d(x, weight, groups=64)
    assert_close(traced(x), theirs)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_operations_call_mlx_for_16_bit_inputs(dtype: mx.Dtype) -> None:
    x, wide = normal(3, 1000).astype(dtype), normal(3, 1000)
    assert mx.array_equal(operations.silu(x), operations._silu(x))
    assert mx.array_equal(operations.swiglu(x, x), activations.swiglu(x, x))
    for h, gate, up in ((x, wide, wide), (wide, x, wide), (wide, x, x)):
        ours, theirs = operations.precise_swiglu(h, gate, up), activations.precise_swiglu(h, gate, up)
        assert ours.dtype == theirs.dtype == h.dtype
        assert mx.array_equal(ours, theirs)


def test_install_makes_models_call_the_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((nn, "silu"), (mx, "conv1d")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    operations.install()
    assert (nn.silu, mx.conv1d) == (operations.silu, operations.conv1d)
    for name in ("swiglu", "precise_swiglu"):
        assert getattr(qwen3_next, name) is getattr(operations, name)
        assert getattr(activations, name) is not getattr(operations, name)
    assert vars(switch_layers)["swiglu"] is operations.swiglu
