"""A product of float32 matrices by the BLAS that MLX has too, into memory that the caller names.

Knows numpy's arrays. Where no library was loaded numpy multiplies.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from kvstrata.backend.blas_loader import NO_TRANSPOSE, ROW_MAJOR, blas

TRANSPOSE = 112


def sgemm(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """a [m, k] @ b [n, k].T -> out [m, n], whose rows may lie further apart than n."""
    product = _product()
    if product is None:
        np.matmul(a, b.T, out=out)
        return
    (m, k), n = a.shape, len(b)
    steps = [array.strides[0] // 4 for array in (a, b, out)]
    places = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, out)]
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    sides = (places[0], steps[0], places[1], steps[1])
    product(ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE, m, n, k, one, *sides, zero, places[2], steps[2])


@cache
def _product() -> Any:
    found = blas()
    return ctypes.CDLL(str(found.path)).cblas_sgemm if found.path is not None else None
