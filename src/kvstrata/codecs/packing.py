"""Small codes in uint32 words, as MLX packs them: the first value in the lowest bits."""

from __future__ import annotations

import mlx.core as mx


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


def pack_bytes(codes: mx.array, bits: int) -> mx.array:
    """uint8 [..., n] -> uint8 [..., n * bits / 8]: a stream of bits, for any number of them, if 8 divides n."""
    wide = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, 8)
    word = mx.sum(wide << (mx.arange(8, dtype=mx.uint32) * bits), axis=-1)  # 8 codes of up to 4 bits
    octets = (word[..., None] >> (mx.arange(bits, dtype=mx.uint32) * 8)) & 255
    return octets.astype(mx.uint8).reshape(*codes.shape[:-1], -1)


def unpack_bytes(stream: mx.array, bits: int) -> mx.array:
    """uint8 [..., n * bits / 8] -> uint32 [..., n]"""
    octets = stream.astype(mx.uint32).reshape(*stream.shape[:-1], -1, bits)
    word = mx.sum(octets << (mx.arange(bits, dtype=mx.uint32) * 8), axis=-1)
    codes = (word[..., None] >> (mx.arange(8, dtype=mx.uint32) * bits)) & ((1 << bits) - 1)
    return codes.reshape(*stream.shape[:-1], -1)
