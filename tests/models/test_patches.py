"""Products of experts: what MLX gets wrong on this back-end is mended, and what it gets right is left alone."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.models.patches import mend_products, mended

STOCK = mx.gather_mm


def test_sorted_rows_give_what_unsorted_rows_give() -> None:
    """On every back-end, whatever MLX does by itself."""
    mend_products()
    for count in (64, 70, 130):
        rows = mx.random.normal((count, 64))[:, None]
        weights = mx.random.normal((4, 64, 32))
        indices = mx.sort(mx.random.randint(0, 4, (count,)))
        in_order = mx.gather_mm(rows, weights, rhs_indices=indices, sorted_indices=True)
        assert mx.allclose(in_order, rows @ weights[indices], rtol=1e-2, atol=1e-2)


def test_what_is_right_is_left_alone() -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("on a GPU it may need mending")
    assert mended(STOCK) is STOCK


def as_on_cuda(rows: mx.array, weights: mx.array, *, sorted_indices: bool = False, **options: Any) -> mx.array:
    """The stride of the second axis from the end is taken for that of a row."""
    strides = np.array(cast("Any", rows.astype(mx.float32)), copy=False).strides
    if sorted_indices and strides[-2] == strides[-1]:
        rows = mx.broadcast_to(rows[:1], rows.shape)
    return STOCK(rows, weights, sorted_indices=sorted_indices, **options)


def wrong_when_sorted(rows: mx.array, weights: mx.array, *, sorted_indices: bool = False, **options: Any) -> mx.array:
    return STOCK(rows, weights, **options) * (2 if sorted_indices else 1)


@pytest.mark.parametrize("product", [as_on_cuda, wrong_when_sorted])
def test_what_is_wrong_is_mended(product: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    form = mended(product)
    assert "mended" in caplog.text
    rows, weights = mx.random.normal((70, 64))[:, None], mx.random.normal((4, 64, 32))
    indices = mx.sort(mx.random.randint(0, 4, (70,)))
    expected = rows @ weights[indices]
    ask: dict[str, Any] = {"rhs_indices": indices, "sorted_indices": True}
    assert not mx.allclose(product(rows, weights, **ask), expected, atol=1e-2)
    assert mx.allclose(form(rows, weights, **ask), expected, rtol=1e-2, atol=1e-2)


def test_what_cannot_be_mended_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(*args: Any, **options: Any) -> mx.array:
        return -STOCK(*args, **options)

    assert mended(wrong) is wrong
    assert "reply wrongly" in caplog.text
