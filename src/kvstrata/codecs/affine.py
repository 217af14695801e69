"""`affine`: MLX's own format, a scale and a bias for each group of values.

It is the baseline, and converts from and to mlx-lm's quantized caches: `adopt` and `yield_tuple` copy nothing, and
adopted planes keep the dtype of their scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvstrata.codecs import dispatch
from kvstrata.codecs.base import (
    FLOATS,
    WORDS,
    EncodedArray,
    Extent,
    MismatchedArrays,
    Plane,
    UnsupportedCodec,
    check_input,
    check_queries,
    encode_tiles,
    finite,
    join_plain,
    own,
)

BITS = (8, 6, 5, 4, 3, 2)
GROUPS = (32, 64, 128)
DEFAULT_GROUP = 64


@dataclass(frozen=True)
class AffineCodec:
    bits: int
    group: int = DEFAULT_GROUP

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise UnsupportedCodec(f"affine has {_listed(BITS)} bits, not {self.bits}.")
        if self.group not in GROUPS:
            raise UnsupportedCodec(f"affine has groups of {_listed(GROUPS)}, not {self.group}.")

    @property
    def name(self) -> str:
        return f"affine:{self.bits}" + (f":g{self.group}" if self.group != DEFAULT_GROUP else "")

    @property
    def rotation(self) -> None:
        return None

    def spec(self) -> dict[str, Any]:
        return {"codec": "affine", "version": 1, "bits": self.bits, "group": self.group}

    def check(self, dim: int) -> None:
        if dim < 1 or dim % self.group:
            fitting = [group for group in GROUPS if dim > 0 and dim % group == 0]
            ways = [f"affine:{self.bits}:g{group}" for group in fitting] or ["planes:8 or planes:4"]
            raise UnsupportedCodec(
                f"{self.name}: groups of {self.group} do not divide head_dim {dim}. Use {' or '.join(ways)}."
            )

    def layout(self, extent: Extent) -> dict[str, Plane]:
        num_tokens, groups = extent.num_tokens, extent.dim // self.group
        return {
            "packed": Plane(num_tokens, extent.dim * self.bits // 32, WORDS),
            "scales": Plane(num_tokens, groups, FLOATS),
            "biases": Plane(num_tokens, groups, FLOATS),
        }

    def bits_per_value(self, dim: int) -> float:  # noqa: ARG002
        return self.bits + 32 / self.group

    def encode(self, x: mx.array, position: int = 0) -> EncodedArray:
        check_input(self, x, position)
        # Scales are computed in float32, then rounded: bfloat16 scales would cost more than the last two of eight bits.
        return own(self, encode_tiles(x, position, self._encode_tile), x, position)

    def _encode_tile(self, x: mx.array, position: int) -> dict[str, mx.array]:  # noqa: ARG002
        packed, scales, biases = mx.quantize(finite(x), group_size=self.group, bits=self.bits)
        return {"packed": packed, "scales": scales.astype(mx.float16), "biases": biases.astype(mx.float16)}

    def adopt(self, packed: mx.array, scales: mx.array, biases: mx.array, position: int = 0) -> EncodedArray:
        """Take a tuple of mlx-lm without a copy. The caller ensures that the arrays are not slices of larger ones."""
        arrays = {"packed": packed, "scales": scales, "biases": biases}
        if any(array.ndim < 2 for array in arrays.values()):
            raise MismatchedArrays("Packed values, scales and biases are [..., tokens, width].")
        return EncodedArray(self, arrays, packed.shape[-2], position, scales.shape[-1] * self.group)

    def yield_tuple(self, encoded: EncodedArray) -> tuple[mx.array, mx.array, mx.array]:
        """Return the arrays as mlx-lm's QuantizedKVCache holds them."""
        return encoded.arrays["packed"], encoded.arrays["scales"], encoded.arrays["biases"]

    def decode(self, encoded: EncodedArray, dtype: mx.Dtype) -> mx.array:
        return dispatch.decode_affine(encoded, dtype, self._decode_tile)

    def _decode_tile(self, encoded: EncodedArray, dtype: mx.Dtype) -> mx.array:
        packed, scales, biases = self._read(encoded, dtype)
        return mx.dequantize(packed, scales, biases, group_size=self.group, bits=self.bits)

    def scores(self, q: mx.array, encoded: EncodedArray) -> mx.array:
        check_queries(q, encoded, encoded.dim)
        return dispatch.affine_scores(q, encoded, self)

    def mix(self, p: mx.array, encoded: EncodedArray) -> mx.array:
        check_queries(p, encoded, encoded.num_tokens)
        return dispatch.affine_mix(p, encoded, self)

    def scores_packed(self, q: mx.array, encoded: EncodedArray) -> mx.array:
        packed, scales, biases = self._read(encoded, mx.float32)
        return mx.quantized_matmul(
            q.astype(mx.float32), packed, scales, biases, transpose=True, group_size=self.group, bits=self.bits
        )

    def mix_packed(self, p: mx.array, encoded: EncodedArray) -> mx.array:
        packed, scales, biases = self._read(encoded, mx.float32)
        return mx.quantized_matmul(
            p.astype(mx.float32), packed, scales, biases, transpose=False, group_size=self.group, bits=self.bits
        )

    def join(self, a: EncodedArray, b: EncodedArray) -> EncodedArray:
        return join_plain(a, b)

    def _read(self, encoded: EncodedArray, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
        packed, scales, biases = self.yield_tuple(encoded)
        return packed, scales.astype(dtype), biases.astype(dtype)


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
