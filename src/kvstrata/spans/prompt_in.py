"""mlx-lm's prompt caches, from the tensors of a file to what a span holds. Shapes are checked before arrays are made.

Full attention is taken in pieces, so that no step takes long; windows and states are small. Knows no files: a caller
hands in what tensors look like and, piece by piece, their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from kvstrata.attention.parts import SealedPart
from kvstrata.codecs.affine import AffineCodec
from kvstrata.codecs.base import MismatchedPlanes, Planes
from kvstrata.codecs.raw import RawCodec
from kvstrata.layers.grain import grain_of, ranges
from kvstrata.layers.kinds import LayerSpec
from kvstrata.spans.blocks import DTYPES, PackedArray, array_of
from kvstrata.spans.marks import MarkState
from kvstrata.spans.mlx_caches import adopted
from kvstrata.spans.prompt_file import LayerFile, Scalars, Stored

Read = Callable[[str], np.ndarray]  # the bytes of a tensor, uint8
FLOAT_NAMES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class FullLayerIn:
    """A layer with full attention. `sides`: the paths of the tensors of K and of V."""

    spec: LayerSpec
    sides: tuple[tuple[str, ...], tuple[str, ...]]
    codec: AffineCodec | None  # None: raw

    @property
    def pieces(self) -> Callable[[int], list[tuple[int, int]]]:
        return lambda num_tokens: list(ranges(0, num_tokens, grain_of(self.spec).part_tokens))


def num_tokens_in(layers: list[tuple[LayerSpec, LayerFile]], scalars: Scalars) -> int | None:
    """What the layers that count tokens say; None: no layer does. Raises MismatchedPlanes where they differ."""
    places = {"KVCache": 2, "QuantizedKVCache": 2, "RotatingKVCache": 2, "ChunkedKVCache": 2}
    told = {scalars.int_at(f"{file.path}.{places[file.cache]}") for _, file in layers if file.cache in places}
    if len(told) > 1 or any(number < 1 for number in told):
        raise MismatchedPlanes(f"The layers of the file hold different numbers of tokens: {sorted(told)[:4]}.")
    return next(iter(told), None)


def full_layer(
    spec: LayerSpec, file: LayerFile, tensors: Mapping[str, Stored], scalars: Scalars, num_tokens: int
) -> FullLayerIn:
    if file.cache == "KVCache":
        for side, dim in ((0, spec.k_dim), (1, spec.v_dim)):
            _require(spec, tensors, f"{file.path}.{side}", dim, (DTYPES[spec.dtype],), num_tokens)
        return FullLayerIn(spec, ((f"{file.path}.0",), (f"{file.path}.1",)), None)
    codec = AffineCodec(scalars.int_at(f"{file.path}.4"), scalars.int_at(f"{file.path}.3"))
    for side, dim in ((0, spec.k_dim), (1, spec.v_dim)):
        codec.check(dim)
        _require(spec, tensors, f"{file.path}.{side}.0", dim * codec.bits // 32, ("U32",), num_tokens)
        for plane in (1, 2):
            _require(spec, tensors, f"{file.path}.{side}.{plane}", dim // codec.group, FLOAT_NAMES, num_tokens)
    k, v = (tuple(f"{file.path}.{side}.{plane}" for plane in range(3)) for side in (0, 1))
    return FullLayerIn(spec, (k, v), codec)


def _require(
    spec: LayerSpec, tensors: Mapping[str, Stored], path: str, width: int, dtypes: tuple[str, ...], num_tokens: int
) -> None:
    found = tensors.get(path)
    if found is None or found.dtype not in dtypes:
        held = "nothing" if found is None else found.dtype
        raise MismatchedPlanes(
            f"Tensor {path} of the file is {held}, and {' or '.join(dtypes)} is needed: make the prompt cache with the "
            "model as it is served here."
        )
    shape = found.shape
    if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (1, spec.kv_heads, width) or shape[2] < num_tokens:
        wanted = (1, spec.kv_heads, num_tokens, width)
        raise MismatchedPlanes(f"Tensor {path} of the file is {list(shape)}, not {list(wanted)}: another model's.")


def cut_tensor(octets: np.ndarray, stored: Stored, start: int, end: int) -> PackedArray:
    """Tokens [start, end) of [1, kv_heads, tokens, width], copied."""
    rows = octets.reshape(stored.shape[1], stored.shape[2], -1)[:, start:end]
    return PackedArray(
        stored.dtype, (stored.shape[1], end - start, stored.shape[3]), np.ascontiguousarray(rows).reshape(-1)
    )


def sealed_piece(layer: FullLayerIn, k: list[PackedArray], v: list[PackedArray], position: int) -> SealedPart:
    """On the thread that owns MLX."""
    return SealedPart(*(_planes(layer, arrays, position) for arrays in (k, v)))


def _planes(layer: FullLayerIn, arrays: list[PackedArray], position: int) -> Planes:
    made = [array_of(array) for array in arrays]
    if layer.codec is None:
        return RawCodec().adopt(made[0], position)
    return layer.codec.adopt(made[0], made[1], made[2], position)


def other_layer(
    spec: LayerSpec, file: LayerFile, tensors: Mapping[str, Stored], scalars: Scalars, read: Read, *, num_tokens: int
) -> MarkState:
    """A window, chunk or state at the end of the tokens, on the thread that owns MLX."""

    def array(path: str) -> Any:
        stored = tensors.get(path)
        if stored is None:
            raise MismatchedPlanes(f"The file has no tensor {path[:40]}.")
        return array_of(PackedArray(stored.dtype, stored.shape, read(path)))

    at = file.path
    cache: Any
    if spec.kind == "recurrent":
        cache = ArraysCache(spec.num_arrays)
        paths = [f"{at}.0.{i}" for i in range(spec.num_arrays)]
        cache.cache = [None if scalars.is_none(path) else array(path) for path in paths]
        return adopted(spec, cache, num_tokens, 0)
    numbers = [scalars.int_at(f"{at}.{i}") for i in range(2, 6 if spec.kind == "window" else 5)]
    k, v = (None if scalars.is_none(f"{at}.{side}") else array(f"{at}.{side}") for side in (0, 1))
    if k is None or v is None or any(side.ndim != 4 or side.shape[1] != spec.kv_heads for side in (k, v)):
        raise MismatchedPlanes(f"Layer {at} of the file has no tokens of this model's heads.")
    if spec.kind == "window":
        cache = RotatingKVCache(numbers[2], keep=numbers[1])
        cache.offset, cache._idx = numbers[0], numbers[3]
        if not 0 <= numbers[3] <= k.shape[2]:
            raise MismatchedPlanes(f"Layer {at} of the file goes on outside its ring.")
    else:
        cache = ChunkedKVCache(numbers[1])
        cache.offset, cache.start_position = numbers[0], numbers[2]
    cache.keys, cache.values = k, v
    return adopted(spec, cache, num_tokens, 0)
