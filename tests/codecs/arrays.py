"""Keys as models make them: a few channels far from zero, and far larger than the others."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvstrata.codecs.base import Codec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.registry import parse
from kvstrata.codecs.rope import RopeRotation, make_rotation

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
AFFINE = tuple(f"affine:{bits}{group}" for bits in (8, 6, 5, 4, 3, 2) for group in ("", ":g32", ":g128"))
NAMES = ("raw", *AFFINE, "planes:8", "planes:4", "planes:2")
TURNING = tuple(f"planes:{bits} {kind}" for bits in (8, 4, 2) for kind in ("halves", "neighbours", "last"))

# All dims rotation, or the first ones, or the last ones; as two halves or as neighbours.
ROTATIONS = ("halves", "neighbours", "last")


def some_rotation(kind: str, dim: int, base: float = 10_000.0) -> RopeRotation:
    num_pairs = dim // 4 if kind == "last" else dim // 2
    frequencies = base ** (-np.arange(num_pairs) / num_pairs)
    first = dim - 2 * num_pairs if kind == "last" else 0
    return make_rotation(frequencies, first=first, is_interleaved=kind == "neighbours")


def named(name: str, dim: int) -> Codec:
    """`planes:4` and its like, and `planes:4 halves`, whose means rotation."""
    precision, _, rotation = name.partition(" ")
    codec = parse(precision)
    return (
        PlanesCodec(codec.bits, some_rotation(rotation, dim)) if isinstance(codec, PlanesCodec) and rotation else codec
    )


def keys(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    noise, channels = mx.random.split(mx.random.key(seed))
    dim = shape[-1]
    outlier = mx.random.uniform(shape=(dim,), key=channels) < 0.04
    x = mx.random.normal(shape, key=noise) * mx.where(outlier, 4.0, 1.0) + mx.where(outlier, 12.0, 0.0)
    x = x.astype(dtype)
    mx.eval(x)
    return x


def rms_error(found: mx.array, wanted: mx.array) -> float:
    wanted = wanted.astype(mx.float32)
    return float(mx.linalg.norm(found.astype(mx.float32) - wanted) / mx.linalg.norm(wanted))


def same_bits(a: mx.array, b: mx.array) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    words = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[a.itemsize]
    return bool(mx.array_equal(a.view(words), b.view(words)))


def allocated() -> int:
    """By arrays that are alive. Wants `no_garbage`: collecting it at each call would take longer than the tests."""
    mx.clear_cache()
    return mx.get_active_memory()
