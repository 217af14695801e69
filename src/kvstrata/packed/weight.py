"""Matrix of packed weights in tiles, and its products.

cpu/tiles.py describes the layout. The arrays are MLX's and count as MLX's memory; the kernels read them in place.
Products need numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.packed.cpu import products as cpu_products
from kvstrata.packed.cpu.tiles import BASES
from kvstrata.packed.form import Activations
from kvstrata.packed.quantized import TILE_COLUMNS, TILE_ROWS, QuantizedMatrix, num_panels
from kvstrata.platform.blas import sgemm

KINDS = {mx.float16: cpu_products.HALF, mx.bfloat16: cpu_products.BFLOAT, mx.float32: cpu_products.FLOAT}
# For more float32 vectors than this, BLAS over unpacked rows is faster.
BLAS_VECTORS = 4
# Values that are dequantized for BLAS at a time, so that they fit a CPU cache.
DEQUANTIZED_VALUES = 1 << 20
# Fewest values that are worth waking other threads.
PARALLEL_VALUES = 1 << 15


class ActivationVectors:
    """Activations [vectors, in] as products take them: float32, or rounded to 8 or 16 bits in groups of 32."""

    def __init__(self, values: np.ndarray, activations: Activations) -> None:
        self.values = values
        self.coded: tuple[np.ndarray, ...] | None = None
        if activations != 32:
            groups = (values.shape[0], values.shape[1] // TILE_COLUMNS)
            low = np.empty(values.shape if activations == 16 else (0, 0), np.int8)
            self.coded = (np.empty(values.shape, np.int8), low, *np.empty((2, *groups), np.float32))
            is_large = values.size >= PARALLEL_VALUES and len(values) > 1
            (cpu_products.quantize_parallel if is_large else cpu_products.quantize)(values, self.coded)

    @cached_property
    def sums(self) -> np.ndarray:
        out = np.empty((self.values.shape[0], self.values.shape[1] // TILE_COLUMNS), np.float32)
        cpu_products.sum_groups(self.values, out)
        return out


@dataclass(frozen=True)
class TileFormat:
    """Format of codes and scales. Matrices of the same format can be joined."""

    bits: int
    kind: int  # of scales: see cpu/products.py
    group: int
    columns: int


class PackedWeight:
    """Packed matrix [out, in]."""

    def __init__(self, codes: mx.array, scales: mx.array, form: TileFormat, rows: int) -> None:
        self.arrays = (codes, scales)  # bytes, whatever they encode
        self.form = form
        self.shape = (rows, form.columns)
        self._num_panels = num_panels(rows)
        # In the order of cpu/products.py.
        self.fields: Any = (
            np.asarray(codes), np.asarray(scales), np.int64(form.bits), np.int64(form.kind),
            np.float32(BASES[form.bits]), np.int64(form.group // TILE_COLUMNS),
            np.int64(form.columns // TILE_COLUMNS), np.int64(self._num_panels), np.int64(rows),
        )  # fmt: skip

    def multiply(self, x: ActivationVectors, out: np.ndarray, first: int = 0) -> None:
        """Write x @ self.T -> out[:, first : first + rows]"""
        rows = self.shape[0]
        if rows % TILE_ROWS:
            padded = np.empty((len(out), self._num_panels * TILE_ROWS), np.float32)
            self._multiply(x, padded, 0)
            out[:, first : first + rows] = padded[:, :rows]
        else:
            self._multiply(x, out, first)

    def _multiply(self, x: ActivationVectors, out: np.ndarray, first: int) -> None:
        if x.coded is not None:
            cpu_products.multiply(self.fields, x.coded, out, first)
        elif len(x.values) <= BLAS_VECTORS:
            cpu_products.multiply_exactly(self.fields, x.values, x.sums, out, first)
        else:
            step = max(1, DEQUANTIZED_VALUES // self.shape[1] // TILE_ROWS)
            for start in range(0, self._num_panels, step):
                some = self._dequantize_panels(np.arange(start, min(start + step, self._num_panels)))
                place = first + start * TILE_ROWS
                sgemm(x.values, some, out[:, place : place + len(some)])

    def dequantize(self) -> np.ndarray:
        """Return the matrix as float32 [out, in]."""
        return self._dequantize_panels(np.arange(self._num_panels))[: self.shape[0]]

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Return the rows at `places` as float32."""
        panels, panel_of = np.unique(places // TILE_ROWS, return_inverse=True)
        return self._dequantize_panels(panels)[panel_of * TILE_ROWS + places % TILE_ROWS]

    def _dequantize_panels(self, panels: np.ndarray) -> np.ndarray:
        out = np.empty((len(panels) * TILE_ROWS, self.shape[1]), np.float32)
        cpu_products.dequantize(self.fields, panels, out)
        return out


def pack(source: QuantizedMatrix) -> PackedWeight:
    rows, columns = source.shape
    mx.eval(source.arrays)
    stream = np.asarray(source.weight).view(np.uint8).reshape(-1)
    codes = np.zeros(num_panels(rows) * TILE_ROWS * columns * source.bits // 8, np.uint8)
    cpu_products.pack(stream, source.bits, len(stream) // rows, codes)
    scales = np.stack([_by_panels(_as_numpy(part)) for part in source.arrays[1:]], axis=2)
    if source.biases is None:
        form = TileFormat(cpu_products.FP4, cpu_products.EXPONENT, source.group, columns)
    else:
        form = TileFormat(source.bits, KINDS[source.scales.dtype], source.group, columns)
    return PackedWeight(mx.array(codes), mx.array(scales.reshape(-1).view(np.uint8)), form, rows)


def join_weights(weights: Sequence[PackedWeight]) -> PackedWeight | None:
    """Join matrices one below the other. None: they differ in format, or do not fill tiles."""
    first = weights[0]
    if any(weight.form != first.form or weight.shape[0] % TILE_ROWS for weight in weights):
        return None
    codes, scales = (mx.concatenate([weight.arrays[i] for weight in weights]) for i in range(2))
    mx.eval(codes, scales)
    return PackedWeight(codes, scales, first.form, sum(weight.shape[0] for weight in weights))


def _by_panels(values: np.ndarray) -> np.ndarray:
    """Arrange [rows, groups] -> [rows / 8, groups, 8], padded with zero rows"""
    rows, groups = values.shape
    padded = np.zeros((num_panels(rows) * TILE_ROWS, groups), values.dtype)
    padded[:rows] = values
    return padded.reshape(-1, TILE_ROWS, groups).swapaxes(1, 2)


def _as_numpy(array: mx.array) -> np.ndarray:
    """Convert to numpy; bfloat16 as uint16, because numpy does not know it."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
