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
