"""`rotated`: a Hadamard rotation, the best codebook for what comes out of it (a normal distribution), and a norm.

The stored norm is n / |c|, c the centroids chosen, so that the decoded norm is exact. Stops at 4 bits because `planes`
is better above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.codecs import cpu, paths
from kvstrata.codecs.base import (
    HALF,
    Extent,
    Plane,
    Planes,
    UnsupportedCodec,
    check_input,
    check_queries,
    finite,
    half,
    join_plain,
    own,
)
from kvstrata.codecs.packing import pack_bytes, unpack_bytes
from kvstrata.codecs.rotation import check_dim, rotate, rotate_back
from kvstrata.codecs.tiles import decode_tiles, encode_tiles

# Lloyd-Max for N(0, 1), positive half. Part of the format.
CENTROIDS = {
    2: (0.45278, 1.51042),
    3: (0.24509, 0.75601, 1.34391, 2.15195),
    4: (0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259),
}


def codebook(bits: int) -> np.ndarray:
    """float32 [2**bits], rising."""
    positive = np.array(CENTROIDS[bits], np.float32)
    return np.concatenate([-positive[::-1], positive])


@dataclass(frozen=True)
class RotatedCodec:
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in CENTROIDS:
            raise UnsupportedCodec(f"rotated has 4, 3 or 2 bits, not {self.bits}. For more use planes:8.")

    @property
    def name(self) -> str:
        return f"rotated:{self.bits}"

    def spec(self) -> dict[str, Any]:
        return {"codec": "rotated", "version": 1, "bits": self.bits}

    def check(self, dim: int) -> None:
        check_dim(self.name, dim)

    def layout(self, extent: Extent) -> dict[str, Plane]:
        # Bytes, not words: 80 values of 3 bits are 30 bytes and no whole number of words.
        width = extent.dim * self.bits // 8
        return {"codes": Plane(extent.num_tokens, width, (mx.uint8,)), "norms": Plane(extent.num_tokens, 1, HALF)}

    def bits_per_value(self, dim: int) -> float:
        return self.bits + 16 / dim

    def encode(self, x: mx.array, position: int = 0) -> Planes:
        check_input(self, x, position)
        if paths.active() == "cpu":
            codes, norms = cpu.encode_rotated(x.astype(mx.float32), codebook(self.bits))
        else:
            tiles = encode_tiles(x, position, self.encode_stock)
            codes, norms = tiles["codes"], tiles["norms"]
        return own(self, {"codes": codes, "norms": half(norms)}, x, position)

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        if paths.active() == "cpu":
            return rotate_back(self._centroids(planes)).astype(dtype)
        return decode_tiles(planes, lambda tile: rotate_back(self.centroids_stock(tile)).astype(dtype))

    def scores(self, q: mx.array, planes: Planes) -> mx.array:
        check_queries(q, planes, planes.dim)
        return rotate(q.astype(mx.float32)) @ self._centroids(planes).swapaxes(-1, -2)

    def mix(self, p: mx.array, planes: Planes) -> mx.array:
        check_queries(p, planes, planes.num_tokens)
        return rotate_back(p.astype(mx.float32) @ self._centroids(planes))

    def join(self, a: Planes, b: Planes) -> Planes:
        return join_plain(a, b)

    def encode_stock(self, x: mx.array, position: int = 0) -> dict[str, mx.array]:  # noqa: ARG002
        x = finite(x)
        norm = mx.linalg.norm(x, axis=-1, keepdims=True)
        y = rotate(x * (math.sqrt(x.shape[-1]) / mx.maximum(norm, 1e-30)))
        codes = self._nearest(y)
        chosen = mx.linalg.norm(mx.array(codebook(self.bits))[codes], axis=-1, keepdims=True)
        return {"codes": pack_bytes(codes, self.bits), "norms": norm / chosen}

    def _nearest(self, y: mx.array) -> mx.array:
        """uint8 [..., dim]: between two centroids the nearest changes halfway."""
        table = codebook(self.bits)
        codes = mx.zeros(y.shape, mx.uint8)
        for boundary in (table[:-1] + table[1:]) / 2:
            codes = codes + (y > float(boundary)).astype(mx.uint8)
        return codes

    def _centroids(self, planes: Planes) -> mx.array:
        """float32 [..., tokens, dim], still rotated."""
        stream, norms = planes.arrays["codes"], planes.arrays["norms"]
        if paths.active() == "cpu":
            return cpu.look_up(stream, norms, codebook(self.bits), planes.dim)
        return self.centroids_stock(planes)

    def centroids_stock(self, planes: Planes) -> mx.array:
        stream, norms = planes.arrays["codes"], planes.arrays["norms"]
        return mx.array(codebook(self.bits))[unpack_bytes(stream, self.bits)] * norms.astype(mx.float32)
