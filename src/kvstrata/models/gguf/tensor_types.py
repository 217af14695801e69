"""Types of GGUF tensors, and their conversion to MLX's affine format with groups of 32 or to a plain array.

    Q4_0 Q4_1 Q5_0 Q5_1 Q8_0    the same codes; one scale and one bias for 32 values, as they are
    Q4_K Q5_K                   the same codes; scale and bias are products (16 bits times 6), rounded to float16
    Q6_K                        its groups have 16 values, which MLX has not: coded anew with 8 bits
    F16 BF16 F32                as they are; F32 becomes float16

Affine is scale * code + bias, codes as a stream of bits in words of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

GROUP = 32
SUPER = 256  # values of a block of the K types


class Codes(NamedTuple):
    codes: np.ndarray  # uint8 [groups, 32]
    scales: np.ndarray  # float32 [groups]
    biases: np.ndarray
    bits: int


@dataclass(frozen=True)
class GgufBlockType:
    name: str
    num_values: int
    num_bytes: int
    unpack: Callable[[np.ndarray], Codes] | None = None  # uint8 [blocks, num_bytes]; None: not packed


class Affine(NamedTuple):
    """MLX's affine format: rows of packed words, of scales and of biases."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int


def _halves(octets: np.ndarray) -> np.ndarray:
    """uint8 [..., 2 * n] -> float32 [..., n]"""
    return np.ascontiguousarray(octets).view("<f2").astype(np.float32)


def _nibbles(octets: np.ndarray) -> np.ndarray:
    """All low ones of a row, then all high ones."""
    return np.concatenate([octets & 15, octets >> 4], axis=-1)


def _fifth_bits(octets: np.ndarray) -> np.ndarray:
    """uint8 [n, 4] -> 16 where a bit is set, [n, 32]"""
    return np.unpackbits(octets, axis=-1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> Codes:
    scales = _halves(blocks[:, :2])[:, 0]
    return Codes(_nibbles(blocks[:, 2:]), scales, -8 * scales, 4)


def _q4_1(blocks: np.ndarray) -> Codes:
    scales, biases = _halves(blocks[:, :4]).T
    return Codes(_nibbles(blocks[:, 4:]), scales, biases, 4)


def _q5_0(blocks: np.ndarray) -> Codes:
    scales = _halves(blocks[:, :2])[:, 0]
    return Codes(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scales, -16 * scales, 5)


def _q5_1(blocks: np.ndarray) -> Codes:
    scales, biases = _halves(blocks[:, :4]).T
    return Codes(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), scales, biases, 5)


def _q8_0(blocks: np.ndarray) -> Codes:
    scales = _halves(blocks[:, :2])[:, 0]
    return Codes(blocks[:, 2:] ^ 0x80, scales, -128 * scales, 8)  # a signed number plus 128


def _scales_of_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight biases of a block, of 6 bits each in 12 bytes."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1).astype(np.float32)
    biases = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1).astype(np.float32)
    factors = _halves(blocks[:, :4])
    return (factors[:, :1] * scales).reshape(-1), (-factors[:, 1:] * biases).reshape(-1)


def _q4_k(blocks: np.ndarray) -> Codes:
    scales, biases = _scales_of_k(blocks)
    return Codes(_nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, GROUP), scales, biases, 4)


def _q5_k(blocks: np.ndarray) -> Codes:
    scales, biases = _scales_of_k(blocks)
    # Bit i of a byte belongs to the i-th group of 32.
    high = (blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1).swapaxes(1, 2).reshape(-1, GROUP)
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, GROUP)
    return Codes(low | high << 4, scales, biases, 5)


def _q6_k(blocks: np.ndarray) -> Codes:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    lower = np.concatenate([low & 15, low >> 4], axis=-1).reshape(-1, 2, 4, 32)
    upper = high >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3
    codes = (lower | upper << 4).reshape(-1, 16, 16).astype(np.int8) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks[:, 208:])
    return _coded(codes * scales[:, :, None])


def _coded(values: np.ndarray) -> Codes:
    """Groups of 32 with 8 bits, from their smallest value to their largest."""
    groups = values.reshape(-1, GROUP)
    least, most = groups.min(axis=1), groups.max(axis=1)
    scales, biases = ((each.astype(np.float16)).astype(np.float32) for each in ((most - least) / 255, least))
    steps = (groups - biases[:, None]) / np.where(scales == 0, 1, scales)[:, None]
    return Codes(np.clip(np.rint(steps), 0, 255).astype(np.uint8), scales, biases, 8)


BLOCKS = {
    0: GgufBlockType("F32", 1, 4),
    1: GgufBlockType("F16", 1, 2),
    2: GgufBlockType("Q4_0", GROUP, 18, _q4_0),
    3: GgufBlockType("Q4_1", GROUP, 20, _q4_1),
    6: GgufBlockType("Q5_0", GROUP, 22, _q5_0),
    7: GgufBlockType("Q5_1", GROUP, 24, _q5_1),
    8: GgufBlockType("Q8_0", GROUP, 34, _q8_0),
    12: GgufBlockType("Q4_K", SUPER, 144, _q4_k),
    13: GgufBlockType("Q5_K", SUPER, 176, _q5_k),
    14: GgufBlockType("Q6_K", SUPER, 210, _q6_k),
    30: GgufBlockType("BF16", 1, 2),
}

_BY_NAME = {block.name: block for block in BLOCKS.values()}


def codes_of(kind: str, octets: np.ndarray) -> Codes | None:
    """Return the codes of a tensor; None for types that are not packed."""
    block = _BY_NAME[kind]
    return None if block.unpack is None else block.unpack(octets.reshape(-1, block.num_bytes))


def affine(kind: str, octets: np.ndarray, shape: tuple[int, ...]) -> Affine | None:
    found = codes_of(kind, octets)
    if found is None:
        return None
    *rows, width = shape
    words = _packed(found.codes.reshape(*rows, width), found.bits)
    scales, biases = (each.astype(np.float16).reshape(*rows, -1) for each in (found.scales, found.biases))
    return Affine(mx.array(words), mx.array(scales), mx.array(biases), found.bits)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [..., width] -> uint32 [..., width * bits / 32], the first code in the lowest bits"""
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u4")
    if bits == 4:
        return np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4).view("<u4")
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little", count=bits)
    octets = np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(octets).view("<u4")


def plain(kind: str, octets: np.ndarray, shape: tuple[int, ...]) -> mx.array:
    """Return a tensor that is not packed, in 16 bits."""
    if kind == "BF16":
        return mx.array(octets.view("<u2").reshape(shape)).view(mx.bfloat16)
    numbers = octets.view("<f4" if kind == "F32" else "<f2").reshape(shape)
    return mx.array(numbers.astype(np.float16))
