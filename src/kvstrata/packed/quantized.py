"""Matrices as MLX quantizes them, and the sizes of tiles.

A module of its own because it needs no numba: place.py predicts sizes without it, and the kernels import it.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

TILE_ROWS = 8
TILE_COLUMNS = 32
# Planes of codes by the bits of a code, the lowest bits first.
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
GROUPS = (32, 64, 128)
SCALES = (mx.float16, mx.bfloat16, mx.float32)


@dataclass(frozen=True)
class QuantizedMatrix:
    """Quantized matrix [out, in], or several of the same shape."""

    weight: mx.array  # uint32 words
    scales: mx.array
    biases: mx.array | None
    group: int
    bits: int
    mode: str

    @property
    def fits(self) -> bool:
        """Whether tiles exist for this format."""
        if self.mode == "mxfp4":
            return self.group == TILE_COLUMNS and self.bits == 4
        return self.mode == "affine" and self.bits in PLANES and self.group in GROUPS and self.scales.dtype in SCALES

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[-2], self.scales.shape[-1] * self.group

    @property
    def arrays(self) -> list[mx.array]:
        return [self.weight, self.scales, *([] if self.biases is None else [self.biases])]

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed matrix: those of the arrays, with rows rounded up to whole tiles."""
        rows = self.shape[0]
        return sum(array.nbytes for array in self.arrays) // rows * num_panels(rows) * TILE_ROWS


def num_panels(rows: int) -> int:
    """Return the number of panels (rows of tiles) that hold `rows` rows of a matrix."""
    return -(-rows // TILE_ROWS)
