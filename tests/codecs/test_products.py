"""Products of 16-bit arrays: whatever a machine's kernels do, scores are those of float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs.raw import exact_mix, exact_scores, least_rows

DTYPES = [mx.bfloat16, mx.float16, mx.float32]


def arrays(dtype: mx.Dtype, queries: int, tokens: int) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(3)
    offset = 4 * rng.standard_normal(64)
    q, k = (mx.array((rng.standard_normal((2, n, 64)) + offset).astype(np.float32)) for n in (queries, tokens))
    return q.astype(dtype), k.astype(dtype)


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


@pytest.mark.parametrize("rows", [1, 2, None])
@pytest.mark.parametrize(("queries", "tokens"), [(1, 1), (1, 300), (3, 1), (3, 300)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_16_bit_arrays_are_exact(
    dtype: mx.Dtype, queries: int, tokens: int, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rows`: how many a product needs on the machine."""
    monkeypatch.setattr("kvstrata.codecs.raw.least_rows", lambda _: rows)
    q, k = arrays(dtype, queries, tokens)
    expected = 0.0884 * (wide(q) @ wide(k).swapaxes(-1, -2))
    found = exact_scores(q, k, 0.0884)
    assert found.dtype == mx.float32
    assert np.abs(wide(found) - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mix_loses_only_the_rounding_of_its_result(dtype: mx.Dtype) -> None:
    """Over so many tokens that single weights are smaller than the smallest number of float16."""
    rng = np.random.default_rng(5)
    v = mx.array(rng.standard_normal((1, 40_000, 16)).astype(np.float32) + 1).astype(dtype)
    weights = rng.random((1, 2, 40_000)).astype(np.float32)
    weights *= 0.03 / weights.sum(axis=-1, keepdims=True)
    expected = weights.astype(np.float64) @ wide(v)
    rounded = wide(mx.array(expected.astype(np.float32)).astype(dtype))
    error = np.abs(wide(exact_mix(mx.array(weights), v)) - expected).max()
    assert error <= 1.5 * np.abs(rounded - expected).max() + 1e-5 * np.abs(expected).max()


def test_a_machine_that_rounds_first_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds_first(near: mx.array, q: mx.array, keys: mx.array, alpha: float = 1.0, beta: float = 1.0) -> mx.array:
        return near * beta + (q @ keys) * alpha

    least_rows.cache_clear()
    monkeypatch.setattr(mx, "addmm", rounds_first)
    try:
        assert least_rows(mx.bfloat16) is None
        q, k = arrays(mx.bfloat16, 2, 100)
        expected = wide(q) @ wide(k).swapaxes(-1, -2)
        assert np.abs(wide(exact_scores(q, k)) - expected).max() < 1e-5 * np.abs(expected).max()
    finally:
        least_rows.cache_clear()
