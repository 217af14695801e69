"""Planes in float64 numpy: the format written down a second time, for the conformance suite."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.hadamard import block_of, sign_values
from kvstrata.codecs.mean_runs import GROUP_TOKENS, ids, runs_of
from kvstrata.codecs.rope import RopeRotation

LARGEST = 65504.0
BITS = {"top": 2, "next": 2, "low": 4}


def float64(x: mx.array) -> np.ndarray:
    return np.asarray(x.astype(mx.float32)).astype(np.float64)


def decode(encoded: EncodedArray) -> np.ndarray:
    """[heads, tokens, dim]"""
    code, num_bits = np.zeros(1, np.int64), 0
    for name, bits in BITS.items():
        if name in encoded.arrays:
            code, num_bits = code << bits | _unpacked(np.asarray(encoded.arrays[name]), bits), num_bits + bits
    unit = (code + 0.5) / 2 ** (num_bits - 1) - 1
    runs = ids(encoded.mean_runs)
    means = float64(encoded.arrays["means"])[:, runs]
    offsets = (encoded.position + np.arange(encoded.num_tokens)) % GROUP_TOKENS
    centres = _rotated(means, offsets, encoded.codec.rotation)
    return _hadamard(unit * float64(encoded.arrays["scales"])) * sign_values(encoded.dim) + centres


def round_trip(x: mx.array, bits: int, position: int, rotation: RopeRotation | None) -> np.ndarray:
    """Encode and decode [heads, tokens, dim]."""
    values, num_tokens = float64(x), x.shape[-2]
    runs, offsets = ids(runs_of(position, num_tokens)), (position + np.arange(num_tokens)) % GROUP_TOKENS
    usual = np.where(np.abs(values) <= LARGEST, values, 0.0)
    back = _rotated(usual, -offsets, rotation)
    means = np.stack([back[:, runs == i].mean(axis=1) for i in range(runs[-1] + 1)], axis=1)
    centres = _rotated(means.astype(np.float16).astype(np.float64)[:, runs], offsets, rotation)
    finite = np.clip(np.where(np.isnan(values), 0.0, values), -LARGEST, LARGEST)
    y = _hadamard((finite - centres) * sign_values(x.shape[-1]))
    scales = np.minimum(np.abs(y).max(axis=-1, keepdims=True), LARGEST).astype(np.float16).astype(np.float64)
    code = np.clip(np.floor((y / np.where(scales == 0, 1.0, scales) + 1) * 128), 0, 255).astype(np.int64)
    unit = ((code >> (8 - bits)) + 0.5) / 2 ** (bits - 1) - 1
    return _hadamard(unit * scales) * sign_values(x.shape[-1]) + centres


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    shifts = np.arange(32 // bits) * bits
    codes = (words[..., None].astype(np.int64) >> shifts) & ((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1)


def _hadamard(x: np.ndarray) -> np.ndarray:
    block = block_of(x.shape[-1])
    signs = np.array([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)])
    return (x.reshape(*x.shape[:-1], -1, block) @ signs).reshape(x.shape) / np.sqrt(block)


def _rotated(x: np.ndarray, offsets: np.ndarray, rotation: RopeRotation | None) -> np.ndarray:
    if rotation is None:
        return x
    angles, (firsts, seconds) = rotation.angles(offsets), rotation.pairs()
    out = x.copy()
    out[..., firsts] = x[..., firsts] * np.cos(angles) - x[..., seconds] * np.sin(angles)
    out[..., seconds] = x[..., seconds] * np.cos(angles) + x[..., firsts] * np.sin(angles)
    return out
