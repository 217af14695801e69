"""Replacements of functions of mlx-lm and MLX: row trimming, and expert products.

mlx-lm's models are an inner model that gives hidden states and an outer one that puts the output layer on top. Row
trimming makes the inner model hand on only the tokens that a `PassCaches` keeps, so that the output layer runs for
sampled tokens and not for those of a prompt. Where a model is built in another way, logits of all rows are computed:
slower, and as right.

mlx-lm sorts the rows of a long pass by expert, and tells MLX so. On CUDA, MLX 0.32.4 then reads rows from the wrong
place if their singleton axis was inserted (`x[:, None, :]`), which adding the experts' biases can pass on; Metal had
the same (https://github.com/ml-explore/mlx/pull/3960). No error is raised: the reply is wrong. So the product is tried
on this machine and replaced where it is wrong. The product of quantized experts (`gather_qmm`) is right there, as far
as was seen (docs/gpu.md).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from kvstrata.codecs.backends import relative_error
from kvstrata.kv.mixed_pass import PassCaches


def trim_rows(model: Any) -> bool:
    """Trim rows in a loaded model. False: it has no known inner model."""
    while isinstance(getattr(model, "language_model", None), nn.Module):
        model = model.language_model
    inner = getattr(model, "model", None)
    if not isinstance(inner, nn.Module):
        return False
    inner.__class__ = _trimmed(type(inner))
    return True


@cache
def _trimmed(inner: type[Any]) -> type[Any]:
    if getattr(inner, "trims_rows", False):
        return inner

    def call(self: Any, *args: Any, **options: Any) -> Any:
        out = inner.__call__(self, *args, **options)
        passed = next((value for value in (*args, *options.values()) if isinstance(value, PassCaches)), None)
        return passed.keep(out) if passed is not None and isinstance(out, mx.array) else out

    # The name stays the same for messages, and for models that check it.
    return type(inner.__name__, (inner,), {"__call__": call, "trims_rows": True})


Product = Callable[..., mx.array]

# More rows than mlx-lm needs to sort them.
_NUM_EXPERTS, _NUM_ROWS, _IN_DIM, _OUT_DIM = 8, 70, 128, 96
_TOLERANCE = 0.02  # of the largest value; rows from elsewhere are off by about 1

logger = logging.getLogger(__name__)


@cache
def mend_products() -> None:
    """Replace wrong products of MLX, once in a process, before a model runs."""
    mx.gather_mm = mended(mx.gather_mm)


def mended(product: Product) -> Product:
    """Return the product if it is right, else its fastest form that is right."""
    error = _error(product)
    if error < _TOLERANCE:
        return product
    for form in (_with_own_strides(product), _unsorted(product)):
        if _error(form) < _TOLERANCE:
            logger.info("Sorted products of experts are off by %.3g in MLX here, and mended.", error)
            return form
    logger.warning("Products of experts are off by %.3g in MLX here: mixture-of-experts models reply wrongly.", error)
    return product


def _with_own_strides(product: Product) -> Product:
    def call(rows: mx.array, *args: Any, sorted_indices: bool = False, **options: Any) -> mx.array:
        if sorted_indices:
            # No copy. A reshape to the same shape would do nothing, and `mx.contiguous` keeps the strides.
            rows = rows.reshape(-1).reshape(rows.shape)
        return product(rows, *args, sorted_indices=sorted_indices, **options)

    return call


def _unsorted(product: Product) -> Product:
    def call(*args: Any, sorted_indices: bool = False, **options: Any) -> mx.array:
        del sorted_indices
        return product(*args, **options)

    return call


def _error(product: Product) -> float:
    weights = _random(_NUM_EXPERTS, _OUT_DIM, _IN_DIM).swapaxes(-1, -2)  # as mlx-lm stores them
    indices = mx.arange(_NUM_ROWS, dtype=mx.uint32) * _NUM_EXPERTS // _NUM_ROWS
    inserted = _random(_NUM_ROWS, _IN_DIM)[:, None]
    reached = product(inserted, weights, rhs_indices=indices, sorted_indices=True)
    error = relative_error(reached, inserted @ weights[indices])
    return math.inf if math.isnan(error) else error


def _random(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(7))
