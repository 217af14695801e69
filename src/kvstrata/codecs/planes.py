"""`planes`: a centred, rotated, progressive format. A code of fewer bits is the upper part of a code of more bits.

    code      8 bits = top crumb (2) | next crumb (2) | low nibble (4), each in a plane of its own
    planes:8  top, next, low        planes:4  top, next        planes:2  top

After the Hadamard rotation a value is (code - middle) * step * scale: `scale`, the only float16 stored for a vector, is
its largest magnitude; `step` and `middle` follow from the bits. Each plane is therefore also an affine array for
`mx.quantized_matmul`, with scales and biases derived when it is read. Stepping down drops planes and touches no other.

Vectors, values as well as keys, are centred on the mean of their mean run (see mean_runs.py); the means of keys follow
the RoPE rotation of their layer's keys (see rope.py). A vector that is smaller, once centred, than the smallest number
of float16 decodes to the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from kvstrata.codecs import dispatch, rope
from kvstrata.codecs.base import (
    HALF,
    LARGEST,
    WORDS,
    EncodedArray,
    Extent,
    Plane,
    UnsupportedCodec,
    check_input,
    check_neighbours,
    check_queries,
    encode_tiles,
    finite,
    half,
    own,
)
from kvstrata.codecs.hadamard import check_dim, rotate, rotate_back
from kvstrata.codecs.mean_runs import GROUP_TOKENS, runs_of, sums
from kvstrata.codecs.rope import RopeRotation


class CodePlane(NamedTuple):
    """A plane of codes: a code c adds (c * scale + bias) * the stored scale to a value."""

    bits: int
    scale: float
    bias: float


# The most significant plane first. The biases of the first n planes add up to the bias of a code of n planes.
CODE_PLANES = {
    "top": CodePlane(2, 1 / 2, -0.75),
    "next": CodePlane(2, 1 / 8, 0.5 / 8 - 0.25),
    "low": CodePlane(4, 1 / 128, 0.5 / 128 - 0.5 / 8),
}

HELD = {8: ("top", "next", "low"), 4: ("top", "next"), 2: ("top",)}

# Group sizes of `mx.quantized_matmul`, the best first. None divides a dim of 80: such vectors are decoded.
PRODUCT_GROUPS = (128, 64, 32)


class _Affine(NamedTuple):
    codes: mx.array
    scales: mx.array
    biases: mx.array
    group: int
    bits: int


@dataclass(frozen=True)
class PlanesCodec:
    bits: int
    rotation: RopeRotation | None = None  # RoPE rotation of the means; None: they are not rotated

    def __post_init__(self) -> None:
        if self.bits not in HELD:
            raise UnsupportedCodec(f"planes has 8, 4 or 2 bits, not {self.bits}.")

    @property
    def name(self) -> str:
        return f"planes:{self.bits}"

    def spec(self) -> dict[str, Any]:
        """Return the spec. Version 2 is version 1 with a RoPE rotation."""
        spec = {"codec": "planes", "version": 1, "bits": self.bits}
        return spec if self.rotation is None else {**spec, "version": 2, "turn": self.rotation.spec()}

    def check(self, dim: int) -> None:
        check_dim(self.name, dim)
        if self.rotation is not None and self.rotation.end > dim:
            raise UnsupportedCodec(f"{self.name} cannot rotate {self.rotation.end} dims of vectors that have {dim}.")

    def layout(self, extent: Extent) -> dict[str, Plane]:
        dim, num_tokens, num_mean_runs = extent
        codes = {name: Plane(num_tokens, dim * CODE_PLANES[name].bits // 32, WORDS) for name in HELD[self.bits]}
        return {**codes, "scales": Plane(num_tokens, 1, HALF), "means": Plane(num_mean_runs, dim, HALF)}

    def bits_per_value(self, dim: int) -> float:
        return self.bits + 16 / dim + 16 / GROUP_TOKENS

    def encode(self, x: mx.array, position: int = 0) -> EncodedArray:
        check_input(self, x, position)
        arrays = dispatch.encode_planes(x, position, self)
        held = {name: arrays[name] for name in (*HELD[self.bits], "scales", "means")}
        return own(self, held, x, position, runs_of(position, x.shape[-2]))

    def encode_by_mlx(self, x: mx.array, position: int) -> dict[str, mx.array]:
        """Encode with MLX's operations, in tiles."""
        arrays = encode_tiles(x, position, self.encode_stock)
        return {name: arrays[name] for name in (*HELD[self.bits], "scales", "means")}

    def encode_stock(self, x: mx.array, position: int) -> dict[str, mx.array]:
        """Encode to all planes, whatever the bits."""
        x, mean_runs = x.astype(mx.float32), runs_of(position, x.shape[-2])
        # NaN, infinities and values beyond float16's range must not move the mean.
        usual = mx.where(mx.abs(x) <= LARGEST, x, 0.0)
        means = rope.means_of(usual, position, self.rotation).astype(mx.float16)
        centres = rope.RopeMeans(means.astype(mx.float32), mean_runs, position, self.rotation).centres()
        y = rotate(finite(x) - centres)
        scales = half(mx.max(mx.abs(y), axis=-1, keepdims=True))
        # Codes are computed from the stored scale, so the rounding of the scale costs nothing.
        unit = y / mx.where(scales == 0, 1.0, scales.astype(mx.float32))
        code = mx.clip(mx.floor((unit + 1) * 128), 0, 255).astype(mx.uint32)
        codes = {"top": pack(code >> 6, 2), "next": pack((code >> 4) & 3, 2), "low": pack(code & 15, 4)}
        return {**codes, "scales": scales, "means": means}

    def decode(self, encoded: EncodedArray, dtype: mx.Dtype) -> mx.array:
        return dispatch.decode_planes(encoded, dtype, self)

    def decode_by_mlx(self, encoded: EncodedArray, dtype: mx.Dtype) -> mx.array:
        """Decode with MLX's operations, in tiles."""
        return dispatch.decode_by_tiles(encoded, lambda tile: self.decode_stock(tile).astype(dtype))

    def scores(self, q: mx.array, encoded: EncodedArray) -> mx.array:
        check_queries(q, encoded, encoded.dim)
        return dispatch.planes_scores(q, encoded, self)

    def mix(self, p: mx.array, encoded: EncodedArray) -> mx.array:
        check_queries(p, encoded, encoded.num_tokens)
        return dispatch.planes_mix(p, encoded, self)

    def decode_stock(self, encoded: EncodedArray) -> mx.array:
        if _product_group(encoded.dim):
            first, *others = (_dequantized(plane) * step for step, plane in self._affine(encoded))
        else:
            first, *others = (_unpacked(encoded, name) for name in HELD[self.bits])
        return rotate_back(sum(others, start=first)) + self.means_of(encoded).centres()

    def scores_packed(self, q: mx.array, encoded: EncodedArray) -> mx.array:
        q = q.astype(mx.float32)
        rotated = rotate(q)
        products = [
            mx.quantized_matmul(rotated * step, *plane[:3], transpose=True, group_size=plane.group, bits=plane.bits)
            for step, plane in self._affine(encoded)
        ]
        return sum(products, start=self.means_of(encoded).shares(q))

    def mix_packed(self, p: mx.array, encoded: EncodedArray) -> mx.array:
        p = p.astype(mx.float32)
        first, *others = (
            mx.quantized_matmul(p, *plane[:3], transpose=False, group_size=plane.group, bits=plane.bits) * step
            for step, plane in self._affine(encoded)
        )
        return rotate_back(sum(others, start=first)) + sums(p, encoded.mean_runs) @ self.means_of(encoded).values

    def has_products(self, dim: int) -> bool:
        return _product_group(dim) is not None

    def means_of(self, encoded: EncodedArray) -> rope.RopeMeans:
        values = encoded.arrays["means"].astype(mx.float32)
        return rope.RopeMeans(values, encoded.mean_runs, encoded.position, self.rotation)

    def _affine(self, encoded: EncodedArray) -> Iterator[tuple[float, _Affine]]:
        """Yield each plane as an affine array in units of its step: planes then share scales, and share biases that
        are the same number of steps."""
        group = _product_group(encoded.dim)
        if group is None:
            raise UnsupportedCodec(f"MLX's quantized products need a head_dim that 32 divides, not {encoded.dim}.")
        scales = encoded.arrays["scales"].astype(mx.float32)
        if encoded.dim > group:
            scales = mx.repeat(scales, encoded.dim // group, axis=-1)
        biases: dict[float, mx.array] = {}
        for name in HELD[self.bits]:
            bits, step, bias = CODE_PLANES[name]
            in_steps = bias / step
            if in_steps not in biases:
                biases[in_steps] = scales * in_steps
            yield step, _Affine(encoded.arrays[name], scales, biases[in_steps], group, bits)

    def join(self, a: EncodedArray, b: EncodedArray) -> EncodedArray:
        check_neighbours(a, b)
        arrays = {name: mx.concatenate([array, b.arrays[name]], axis=-2) for name, array in a.arrays.items()}
        mean_runs = (*a.mean_runs, *b.mean_runs)
        if _one_group(a, b):
            boundary = len(a.mean_runs)
            arrays["means"] = mx.concatenate([a.arrays["means"], b.arrays["means"][..., 1:, :]], axis=-2)
            mean_runs = (*a.mean_runs[:-1], a.mean_runs[-1] + b.mean_runs[0], *mean_runs[boundary + 1 :])
        mx.eval(list(arrays.values()))
        return EncodedArray(self, arrays, a.num_tokens + b.num_tokens, a.position, a.dim, mean_runs)


def step_down(encoded: EncodedArray, bits: int) -> EncodedArray:
    """Drop planes until `bits` are left. The remaining arrays are the same objects, and equal the arrays that encoding
    with `bits` would have made."""
    codec = _progressive(encoded)
    held = codec.bits
    if bits not in HELD or bits >= held:
        lower = [f"{fewer}" for fewer in HELD if fewer < held]
        raise UnsupportedCodec(f"{encoded.name} steps down to {' or '.join(lower) or 'nothing'}, not to {bits} bits.")
    gone = {*HELD[held]}.difference(HELD[bits])
    stay = {name: array for name, array in encoded.arrays.items() if name not in gone}
    return replace(encoded, codec=replace(codec, bits=bits), arrays=stay)


def _progressive(encoded: EncodedArray) -> PlanesCodec:
    if not isinstance(encoded.codec, PlanesCodec):
        raise UnsupportedCodec(f"{encoded.name} has no planes to drop. Decode it and encode it as planes.")
    return encoded.codec


def _product_group(dim: int) -> int | None:
    return next((group for group in PRODUCT_GROUPS if dim % group == 0), None)


def _dequantized(plane: _Affine) -> mx.array:
    """float32 [..., tokens, dim]"""
    codes, scales, biases, group, bits = plane
    return mx.dequantize(codes, scales, biases, group_size=group, bits=bits)


def _unpacked(encoded: EncodedArray, name: str) -> mx.array:
    """The contribution of a plane to the values, for a dim that no group divides."""
    bits, scale, bias = CODE_PLANES[name]
    return (unpack(encoded.arrays[name], bits) * scale + bias) * encoded.arrays["scales"].astype(mx.float32)


def _one_group(a: EncodedArray, b: EncodedArray) -> bool:
    """Whether the last mean run of a and the first of b are pieces of one that was cut."""
    if b.position % GROUP_TOKENS == 0:
        return False
    return bool(mx.array_equal(a.arrays["means"][..., -1, :], b.arrays["means"][..., 0, :]))


def pack(codes: mx.array, bits: int) -> mx.array:
    """uint32 [..., n] -> uint32 [..., n * bits / 32], for bits that divide 32."""
    lanes = 32 // bits
    shifts = mx.arange(lanes, dtype=mx.uint32) * bits
    return mx.sum(codes.reshape(*codes.shape[:-1], -1, lanes) << shifts, axis=-1)


def unpack(words: mx.array, bits: int) -> mx.array:
    """uint32 [..., n * bits / 32] -> uint32 [..., n]"""
    shifts = mx.arange(32 // bits, dtype=mx.uint32) * bits
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1)
