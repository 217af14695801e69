"""A matrix of weights in tiles, and its products.

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

from kvstrata.backend.sgemm import sgemm
from kvstrata.packed.cpu import products as cpu_products
from kvstrata.packed.cpu.tiles import BASES
from kvstrata.packed.form import Activations
from kvstrata.packed.quantized import TILE_COLUMNS, TILE_ROWS, QuantizedMatrix, whole_tiles

KINDS = {mx.float16: cpu_products.HALF, mx.bfloat16: cpu_products.BFLOAT, mx.float32: cpu_products.FLOAT}
# For more float32 vectors than this, BLAS over unpacked rows is faster.
BLAS_VECTORS = 4
# Values that are unpacked for BLAS at a time: they stay in a cache.
UNPACKED_VALUES = 1 << 20
# Fewest values that are worth waking other threads.
PARALLEL_VALUES = 1 << 15


class ActivationVectors:
    """Activations [vectors, in], in the form that the products take."""

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
        made = np.empty((self.values.shape[0], self.values.shape[1] // TILE_COLUMNS), np.float32)
        cpu_products.add_groups(self.values, made)
        return made


@dataclass(frozen=True)
class TileFormat:
    """Storage form of codes and scales. Matrices of the same form can be joined."""

    bits: int
    kind: int  # of scales: see cpu/products.py
    group: int
    columns: int


class PackedWeight:
    """A packed matrix [out, in]."""

    def __init__(self, codes: mx.array, scales: mx.array, form: TileFormat, rows: int) -> None:
        self.arrays = (codes, scales)  # bytes, whatever they encode
        self.form = form
        self.shape = (rows, form.columns)
        self._num_rows = whole_tiles(rows)
        # In the order in which the kernels read them.
        self.fields: Any = (
            np.asarray(codes), np.asarray(scales), np.int64(form.bits), np.int64(form.kind),
            np.float32(BASES[form.bits]), np.int64(form.group // TILE_COLUMNS),
            np.int64(form.columns // TILE_COLUMNS), np.int64(self._num_rows), np.int64(rows),
        )  # fmt: skip

    def multiply(self, x: ActivationVectors, out: np.ndarray, first: int = 0) -> None:
        """Write x @ self.T -> out[:, first : first + rows]"""
        rows = self.shape[0]
        if rows % TILE_ROWS:
            whole = np.empty((len(out), self._num_rows * TILE_ROWS), np.float32)
            self._multiply(x, whole, 0)
            out[:, first : first + rows] = whole[:, :rows]
        else:
            self._multiply(x, out, first)

    def _multiply(self, x: ActivationVectors, out: np.ndarray, first: int) -> None:
        if x.coded is not None:
            cpu_products.multiply(self.fields, x.coded, out, first)
        elif len(x.values) <= BLAS_VECTORS:
            cpu_products.multiply_exactly(self.fields, x.values, x.sums, out, first)
        else:
            step = max(1, UNPACKED_VALUES // self.shape[1] // TILE_ROWS)
            for start in range(0, self._num_rows, step):
                some = self._eights(np.arange(start, min(start + step, self._num_rows)))
                place = first + start * TILE_ROWS
                sgemm(x.values, some, out[:, place : place + len(some)])

    def unpacked(self) -> np.ndarray:
        """Return the matrix as float32 [out, in]."""
        return self._eights(np.arange(self._num_rows))[: self.shape[0]]

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Return the rows at `places` as float32."""
        eights, which = np.unique(places // TILE_ROWS, return_inverse=True)
        return self._eights(eights)[which * TILE_ROWS + places % TILE_ROWS]

    def _eights(self, places: np.ndarray) -> np.ndarray:
        made = np.empty((len(places) * TILE_ROWS, self.shape[1]), np.float32)
        cpu_products.unpack(self.fields, places, made)
        return made


def pack(source: QuantizedMatrix) -> PackedWeight:
    rows, columns = source.shape
    mx.eval(source.arrays)
    stream = np.asarray(source.weight).view(np.uint8).reshape(-1)
    codes = np.zeros(whole_tiles(rows) * TILE_ROWS * columns * source.bits // 8, np.uint8)
    cpu_products.pack(stream, source.bits, len(stream) // rows, codes)
    scales = np.stack([_by_tiles(_octets(part)) for part in source.arrays[1:]], axis=2)
    if source.biases is None:
        form = TileFormat(cpu_products.FP4, cpu_products.EXPONENT, source.group, columns)
    else:
        form = TileFormat(source.bits, KINDS[source.scales.dtype], source.group, columns)
    return PackedWeight(mx.array(codes), mx.array(scales.reshape(-1).view(np.uint8)), form, rows)


def join_weights(weights: Sequence[PackedWeight]) -> PackedWeight | None:
    """Join matrices one below the other. None: they differ in form, or do not fill tiles."""
    first = weights[0]
    if any(weight.form != first.form or weight.shape[0] % TILE_ROWS for weight in weights):
        return None
    codes, scales = (mx.concatenate([weight.arrays[i] for weight in weights]) for i in range(2))
    mx.eval(codes, scales)
    return PackedWeight(codes, scales, first.form, sum(weight.shape[0] for weight in weights))


def _by_tiles(stored: np.ndarray) -> np.ndarray:
    """Arrange [rows, groups] -> [rows / 8, groups, 8], with zeros for rows that are missing"""
    rows, groups = stored.shape
    whole = np.zeros((whole_tiles(rows) * TILE_ROWS, groups), stored.dtype)
    whole[:rows] = stored
    return whole.reshape(-1, TILE_ROWS, groups).swapaxes(1, 2)


def _octets(array: mx.array) -> np.ndarray:
    """Convert to numpy; bfloat16 as uint16, because numpy does not know it."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
