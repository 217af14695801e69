"""The products of mixture-of-experts models, tried on this machine and mended where MLX gets them wrong.

mlx-lm sorts the rows of a long pass by expert, and tells MLX so. On CUDA, MLX 0.32.4 then reads rows from the wrong
place if their singleton axis was inserted (`x[:, None, :]`), which adding the experts' biases can pass on; Metal had
the same (https://github.com/ml-explore/mlx/pull/3960). No error is raised: the reply is wrong. The product of
quantized experts (`gather_qmm`) is right there, as far as was seen (docs/gpu.md).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from kvstrata.codecs.backends import relative_error

Product = Callable[..., mx.array]

# More rows than mlx-lm needs to sort them.
_NUM_EXPERTS, _NUM_ROWS, _IN_DIM, _OUT_DIM = 8, 70, 128, 96
_TOLERANCE = 0.02  # of the largest value; rows from elsewhere are off by about 1

logger = logging.getLogger(__name__)


@cache
def mend_products() -> None:
    """Once in a process, before a model runs."""
    mx.gather_mm = mended(mx.gather_mm)


def mended(product: Product) -> Product:
    """The product itself where it is right, else the fastest form of it that is."""
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
