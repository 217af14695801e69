"""The gated delta rule, compared with its definition token by token in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import gated_delta as stock

from kvstrata.attention import gated_delta
from kvstrata.attention.cpu import gated_delta as cpu_gated_delta
from kvstrata.attention.cpu import step as cpu_step
from kvstrata.codecs import backends
from kvstrata.models.outline import outline_layers
from kvstrata.models.probe import probe
from kvstrata.packed import operations
from tests.support.models import tiny_module

TOLERANCE = 1e-5 if mx.default_device() == mx.cpu else 1e-4
on_cpu = pytest.mark.skipif(not cpu_step.available(), reason="needs numba, and no GPU")


class Inputs(NamedTuple):
    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array

    def between(self, start: int, end: int, state: mx.array) -> Inputs:
        return Inputs._make([*(array[:, start:end] for array in self[:5]), state])


class Shape(NamedTuple):
    rows: int = 1
    tokens: int = 70
    k_heads: int = 2
    group: int = 1
    k_dim: int = 32
    v_dim: int = 12
    has_gates: bool = False  # one for each entry of a key

    def inputs(self, seed: int = 1) -> Inputs:
        rng = np.random.default_rng(seed)
        heads = self.k_heads * self.group
        q, k = (rng.standard_normal((self.rows, self.tokens, self.k_heads, self.k_dim)) for _ in range(2))
        gates = (self.rows, self.tokens, heads, *([self.k_dim] if self.has_gates else []))
        arrays = (
            q / np.linalg.norm(q, axis=-1, keepdims=True) / np.sqrt(self.k_dim),
            k / np.linalg.norm(k, axis=-1, keepdims=True),
            rng.standard_normal((self.rows, self.tokens, heads, self.v_dim)),
            np.exp(-np.exp(2 * rng.standard_normal(gates) - 2)),
            1 / (1 + np.exp(-2 * rng.standard_normal((self.rows, self.tokens, heads)))),
            rng.standard_normal((self.rows, heads, self.v_dim, self.k_dim)),
        )
        return Inputs(*(mx.array(array.astype(np.float32)) for array in arrays))


def defined(inputs: Inputs, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, g, beta, state = (np.asarray(array.astype(mx.float32), np.float64) for array in inputs)
    group = v.shape[2] // k.shape[2]
    q, k = q.repeat(group, 2), k.repeat(group, 2)
    g = g if g.ndim == 4 else g[..., None]
    out = np.zeros_like(v)
    for row in range(len(q)):
        for t in range(q.shape[1]):
            if mask is not None and not mask[row, t]:
                continue
            kept = state[row] * g[row, t, :, None, :]
            delta = (v[row, t] - np.einsum("hvk,hk->hv", kept, k[row, t])) * beta[row, t][:, None]
            state[row] = kept + delta[..., None] * k[row, t][:, None, :]
            out[row, t] = np.einsum("hvk,hk->hv", state[row], q[row, t])
    return out, state


def assert_same(reached: tuple[mx.array, mx.array], expected: tuple[np.ndarray, np.ndarray]) -> None:
    for ours, theirs in zip(reached, expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(
            np.asarray(ours.astype(mx.float32)), theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max()
        )


shapes = st.builds(
    Shape,
    rows=st.integers(1, 3),
    tokens=st.integers(1, 150),
    k_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    k_dim=st.sampled_from([16, 24, 64]),
    v_dim=st.sampled_from([3, 4, 32, 64]),
    has_gates=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 1000))
def test_update_equals_the_definition_for_every_shape(shape: Shape, seed: int) -> None:
    inputs = shape.inputs(seed)
    assert_same(gated_delta.update(*inputs), defined(inputs))
    with backends.without_kernels():
        assert_same(gated_delta.update(*inputs), defined(inputs))


@pytest.mark.parametrize("has_gates", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_masked_tokens_do_not_change_the_state(tokens: int, has_gates: bool) -> None:
    inputs = Shape(rows=2, tokens=tokens, has_gates=has_gates).inputs()
    mask = mx.random.uniform(shape=(2, tokens), key=mx.random.key(3)) < 0.7
    k, v = (mx.where(mask[..., None, None], array, mx.nan) for array in (inputs.k, inputs.v))
    for out, state in by_both(inputs._replace(k=k, v=v), mask):
        assert_same((mx.where(mask[..., None, None], out, 0), state), defined(inputs, np.asarray(mask)))


def by_both(inputs: Inputs, mask: mx.array | None = None) -> list[tuple[mx.array, mx.array]]:
    ours = gated_delta.update(*inputs, mask)
    with backends.without_kernels():
        return [ours, gated_delta.update(*inputs, mask)]


def test_repeated_equal_keys_stay_accurate() -> None:
    """With equal keys and no decay, powers of the triangle would grow to 1e18."""
    q, k, v, g, beta, state = Shape(tokens=256, k_dim=64).inputs()
    same = Inputs(q, mx.broadcast_to(k[:, :1], k.shape), v, mx.ones_like(g), mx.full(beta.shape, 0.99), state)
    for reached in by_both(same):
        assert_same(reached, defined(same))


def test_gate_of_zero_clears_the_state() -> None:
    q, k, v, g, beta, state = Shape(tokens=100).inputs()
    g[:, ::9] = 0
    closed = Inputs(q, k, v, g, beta, state)
    for reached in by_both(closed):
        assert_same(reached, defined(closed))


@given(st.integers(1, 129))
@settings(max_examples=20, deadline=None)
def test_chunked_prompt_equals_whole_prompt(cut: int) -> None:
    inputs = Shape(tokens=130, group=2).inputs()
    with backends.without_kernels():
        out, state = gated_delta.update(*inputs)
        first, between = gated_delta.update(*inputs.between(0, cut, inputs.state))
        second, last = gated_delta.update(*inputs.between(cut, 130, between))
    assert_same((mx.concatenate([first, second], 1), last), (np.asarray(out), np.asarray(state)))


@pytest.mark.parametrize("tokens", [1, 40])
def test_update_does_not_write_the_given_state(tokens: int) -> None:
    inputs = Shape(tokens=tokens).inputs()
    before = np.array(inputs.state)
    mx.eval(by_both(inputs))
    assert np.array_equal(np.array(inputs.state), before)


def test_state_may_have_any_strides() -> None:
    """A state made by blocks, a transposed one, and a broadcast number."""
    inputs = Shape(tokens=20, v_dim=32).inputs()
    with backends.without_kernels():
        _, made = gated_delta.update(*inputs)
    for state in (made, mx.broadcast_to(mx.array(0.5), made.shape), made[:, ::-1]):
        begun = inputs._replace(state=state)
        assert_same(gated_delta.update(*begun), defined(begun))


def test_broadcast_inputs_are_expanded() -> None:
    """Without expansion the loop would read beyond the arrays."""
    inputs = Shape(rows=2, tokens=5).inputs()
    one = inputs._replace(state=inputs.state[:1])
    assert not cpu_gated_delta.takes(*one)
    assert_same(gated_delta.update(*one), defined(inputs._replace(state=mx.repeat(one.state, 2, 0))))


def test_update_can_be_compiled() -> None:
    inputs = Shape(tokens=12).inputs()
    assert_same(mx.compile(gated_delta.update)(*inputs), defined(inputs))


def test_beta_of_two_is_within_a_wider_tolerance() -> None:
    """In some models beta is up to 2: a token removes twice the value that the state has for its key."""
    inputs = Shape(tokens=200).inputs()
    twice = inputs._replace(k=mx.broadcast_to(inputs.k[:, :1], inputs.k.shape), beta=mx.full(inputs.beta.shape, 1.9))
    for reached in by_both(twice):
        for ours, theirs in zip(reached, defined(twice), strict=True):
            np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=1e-3 * np.abs(theirs).max())


def test_missing_state_starts_with_zeros() -> None:
    inputs = Shape().inputs()
    begun = inputs._replace(state=mx.zeros_like(inputs.state))
    assert_same(gated_delta.update(*inputs[:5]), defined(begun))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_16_bit_inputs_keep_the_dtype_of_the_state(dtype: mx.Dtype) -> None:
    inputs = Shape().inputs()
    q, k, v, beta = (array.astype(dtype) for array in (inputs.q, inputs.k, inputs.v, inputs.beta))
    short = inputs._replace(q=q, k=k, v=v, beta=beta)
    expected, _ = defined(short)
    for out, state in by_both(short):
        assert (out.dtype, state.dtype) == (dtype, mx.float32)
        np.testing.assert_allclose(
            np.asarray(out.astype(mx.float32)), expected, rtol=0, atol=0.01 * np.abs(expected).max()
        )


@on_cpu
def test_cpu_backend_runs_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    update = cpu_gated_delta.update
    monkeypatch.setattr(cpu_gated_delta, "update", lambda *arrays: taken.append(arrays[0].shape[1]) or update(*arrays))
    gated_delta.update(*Shape(tokens=1).inputs())
    gated_delta.update(*Shape(tokens=30).inputs())
    gated_delta.update(*Shape(tokens=30, k_dim=24).inputs())
    assert taken == [1, 30]


def test_outline_layers_runs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: mx.array) -> None:
        raise AssertionError("this would read the weights")

    monkeypatch.setattr(cpu_gated_delta, "update", refuse)
    monkeypatch.setattr(operations, "_run_loop", refuse)
    monkeypatch.setattr(operations, "MIN_VALUES", 1)
    monkeypatch.setattr(nn, "silu", operations.silu)
    monkeypatch.setattr(mx, "conv1d", operations.conv1d)
    monkeypatch.setattr(stock, "gated_delta_ops", gated_delta.update)
    layout, _ = outline_layers(tiny_module("qwen3_next"))
    assert {layer.kind for layer in layout.layers} == {"recurrent", "full"}


@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5"])
def test_models_call_the_installed_update(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    update = gated_delta.update

    def watched(q: mx.array, *args: Any) -> tuple[mx.array, mx.array]:
        called.append(q.shape[1])
        return update(q, *args)

    monkeypatch.setattr(gated_delta, "update", watched)
    monkeypatch.setattr(stock, "gated_delta_ops", stock.gated_delta_ops)
    probe(tiny_module(architecture))
    assert called
