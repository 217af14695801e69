"""Attention of a prompt chunk by plain products, on any machine: results compared with MLX's own, and shapes taken."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvstrata.attention.cuda import prefill as cuda_prefill
from kvstrata.attention.cuda.prefill import CALLS_BEFORE_PLAN, MOST_ENTRIES, SeenLengths

SCALE = 0.09


def _random(*shape: int, seed: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _made(
    tokens: int, total: int, heads: int, kv_heads: int, dims: tuple[int, int], dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    k_dim, v_dim = dims
    return (
        _random(1, heads, tokens, k_dim, seed=0, dtype=dtype),
        _random(1, kv_heads, total, k_dim, seed=1, dtype=dtype),
        _random(1, kv_heads, total, v_dim, seed=2, dtype=dtype),
    )


@pytest.mark.parametrize(("dtype", "allowed"), [(mx.float32, 1e-5), (mx.bfloat16, 1e-2), (mx.float16, 2e-3)])
@pytest.mark.parametrize(
    ("tokens", "total", "heads", "kv_heads", "dims"),
    [(5, 5, 2, 2, (64, 64)), (17, 130, 6, 2, (64, 64)), (1, 40, 4, 4, (96, 64)), (33, 34, 8, 1, (128, 128))],
)
@pytest.mark.parametrize("kind", ["causal", "all", "window"])
def test_prefill_equals_mlx(
    tokens: int,
    total: int,
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    kind: str,
    dtype: mx.Dtype,
    allowed: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_prefill, "TILE_ENTRIES", 7 * heads * total)  # so that there is more than one tile
    q, k, v = _made(tokens, total, heads, kv_heads, dims, dtype)
    places = mx.arange(total - tokens, total)[:, None] - mx.arange(total)
    mask = {"causal": "causal", "all": None, "window": (places >= 0) & (places < 9)}[kind]

    found = cuda_prefill.attend(q, k, v, SCALE, mask)

    wide = [x.astype(mx.float32) for x in (q, k, v)]
    expected = mx.fast.scaled_dot_product_attention(*wide, scale=SCALE, mask=mask)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert mx.allclose(found.astype(mx.float32), expected, rtol=0, atol=allowed).item()


def test_takes_leaves_frequent_shapes_to_mlx() -> None:
    q, k, v = _made(3, 19, 2, 1, (64, 64), mx.float32)

    taken = [cuda_prefill.takes(q, k, v, "causal", None) for _ in range(CALLS_BEFORE_PLAN + 2)]

    assert taken == [True] * CALLS_BEFORE_PLAN + [False] * 2


def test_takes_refuses_unsupported_inputs() -> None:
    q, k, v = _made(4, 20, 2, 1, (64, 64), mx.float32)
    assert not cuda_prefill.takes(q, k, v, mx.zeros((4, 20)), None)  # a mask that is added
    assert not cuda_prefill.takes(q, k, v, "causal", mx.zeros((2,)))
    assert not cuda_prefill.takes(q, k.astype(mx.float16), v, "causal", None)
    long = mx.zeros((1, 1, MOST_ENTRIES // 8 + 1, 64))
    assert not cuda_prefill.takes(mx.zeros((1, 1, 8, 64)), long, long, "causal", None)


def test_seen_lengths_forget_the_oldest_shapes() -> None:
    met = SeenLengths(2)
    assert [met.count((shape,)) for shape in (1, 2, 1, 3, 1, 2)] == [1, 1, 2, 1, 3, 1]
