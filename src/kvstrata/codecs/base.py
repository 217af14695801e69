"""The codec protocol and encoded arrays; work in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from kvstrata.codecs.mean_runs import GROUP_TOKENS, MeanRuns, cut_runs
from kvstrata.codecs.rope import RopeMeans, RopeRotation
from kvstrata.errors import ConfigError

# More tiles save little memory: input and output then take more than the scratch of a tile.
MOST_TILES = 8

# An array of at most this many values is one tile: its scratch takes a few MiB.
SMALL_VALUES = 1 << 18


def encode_tiles(
    x: mx.array, position: int, encode: Callable[[mx.array, int], dict[str, mx.array]]
) -> dict[str, mx.array]:
    """Encode [..., tokens, dim], the first token at `position`, in tiles that end where mean runs end."""
    tiles: list[dict[str, mx.array]] = []
    for start, end in _ranges(position, x.shape[-2], x.size):
        tiles.append(encode(x[..., start:end, :], position + start))
        mx.eval(list(tiles[-1].values()))
    return {name: _joined([tile[name] for tile in tiles]) for name in tiles[0]}


def decode_tiles(encoded: EncodedArray, decode: Callable[[EncodedArray], mx.array]) -> mx.array:
    """Decode in tiles, each evaluated before the next."""
    tiles: list[mx.array] = []
    ranges = list(_ranges(encoded.position, encoded.num_tokens, encoded.num_values))
    for start, end in ranges:
        tiles.append(decode(encoded.view(start, end) if len(ranges) > 1 else encoded))
        if len(ranges) > 1:
            mx.eval(tiles[-1])
    return _joined(tiles)


def _ranges(position: int, num_tokens: int, num_values: int) -> Iterator[tuple[int, int]]:
    if num_values <= SMALL_VALUES:
        yield 0, num_tokens
        return
    groups = -(-num_tokens // GROUP_TOKENS)
    size = -(-groups // MOST_TILES) * GROUP_TOKENS
    start = 0
    while start < num_tokens:
        end = min(num_tokens, start + size - (position + start) % GROUP_TOKENS)
        yield start, end
        start = end


def _joined(tiles: list[mx.array]) -> mx.array:
    return mx.concatenate(tiles, axis=-2) if len(tiles) > 1 else tiles[0]


LARGEST = 65504.0  # of float16

FLOATS = (mx.float32, mx.float16, mx.bfloat16)

HALF = (mx.float16,)

WORDS = (mx.uint32,)


class UnsupportedCodec(ConfigError):
    """A codec, a version, a number of bits or a head_dim that this build cannot store."""


class MismatchedArrays(ConfigError):
    """Arrays that do not match each other, or do not match their codec."""


class Extent(NamedTuple):
    dim: int
    num_tokens: int
    num_mean_runs: int


class Plane(NamedTuple):
    """Shape and dtypes of an array of a codec: [..., rows, width]."""

    rows: int
    width: int
    dtypes: tuple[mx.Dtype, ...]


@dataclass(frozen=True, eq=False)
class EncodedArray:
    """Encoded consecutive tokens. Arrays own their memory, unless they are a view."""

    codec: Codec
    arrays: Mapping[str, mx.array]  # by plane name
    num_tokens: int
    position: int  # of the first token, in its sequence
    dim: int
    mean_runs: MeanRuns = ()  # tokens under each mean, for a codec that has means
    gathered: object | None = None  # planes with the same object hold rows of shared arrays; None: nothing is shared

    def __post_init__(self) -> None:
        expected = self.codec.layout(Extent(self.dim, self.num_tokens, len(self.mean_runs)))
        if expected.keys() != self.arrays.keys():
            raise MismatchedArrays(
                f"{self.name} has the planes {', '.join(expected)}, not {', '.join(self.arrays) or 'none'}."
            )
        for name, plane in expected.items():
            _check_plane(f"Plane {name!r} of {self.name}", self.arrays[name], plane)
        if len({array.shape[:-2] for array in self.arrays.values()}) > 1:
            raise MismatchedArrays(f"The planes of {self.name} differ in their leading axes.")
        if self.mean_runs and (min(self.mean_runs) < 1 or sum(self.mean_runs) != self.num_tokens):
            raise MismatchedArrays(f"Mean runs {self.mean_runs} do not add up to {self.num_tokens} tokens.")

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def spec(self) -> dict[str, Any]:
        return self.codec.spec()

    @property
    def end(self) -> int:
        return self.position + self.num_tokens

    @property
    def leading(self) -> tuple[int, ...]:
        return next(iter(self.arrays.values())).shape[:-2]

    @property
    def num_values(self) -> int:
        values = self.num_tokens * self.dim
        for size in self.leading:
            values *= size
        return values

    @cached_property
    def nbytes(self) -> int:
        """Allocated bytes: every array owns its memory and has no gaps."""
        return sum(array.nbytes for array in self.arrays.values())

    def view(self, start: int, end: int) -> EncodedArray:
        """Return tokens [start, end), counted from the first, without encoding or copying anything: the view is valid
        while these planes live."""
        ranges, mean_runs = self._ranges(start, end)
        arrays = {name: array[..., slice(*ranges[name]), :] for name, array in self.arrays.items()}
        return EncodedArray(self.codec, arrays, end - start, self.position + start, self.dim, mean_runs)

    def cut(self, start: int, end: int) -> EncodedArray:
        """Return tokens [start, end), counted from the first, in memory of their own."""
        ranges, mean_runs = self._ranges(start, end)
        arrays = {name: copy_rows(array, *ranges[name]) for name, array in self.arrays.items()}
        mx.eval(list(arrays.values()))
        return EncodedArray(self.codec, arrays, end - start, self.position + start, self.dim, mean_runs)

    def _ranges(self, start: int, end: int) -> tuple[dict[str, tuple[int, int]], MeanRuns]:
        """Return the rows of each array that tokens [start, end) need, and the mean runs of these tokens."""
        if not 0 <= start < end <= self.num_tokens:
            raise MismatchedArrays(f"Tokens {start} to {end} cannot be cut out of {self.num_tokens}.")
        ranges = dict.fromkeys(self.arrays, (start, end))
        if not self.mean_runs:
            return ranges, ()
        mean_runs, first, last = cut_runs(self.mean_runs, start, end)
        return ranges | {"means": (first, last)}, mean_runs

    def where(self) -> dict[str, Any]:
        """Return as JSON-able data what planes need beside their arrays and spec."""
        return {
            "position": self.position,
            "num_tokens": self.num_tokens,
            "dim": self.dim,
            "segments": list(self.mean_runs),
        }


class Codec(Protocol):
    @property
    def name(self) -> str:
        """Name as in the settings, such as `planes:8`. Defaults are left out."""
        ...

    @property
    def rotation(self) -> RopeRotation | None:
        """RoPE rotation of the means; None: the codec has no means, or they are not rotated."""
        ...

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able description with a version; `registry.from_spec` reads it."""
        ...

    def check(self, dim: int) -> None:
        """Raise UnsupportedCodec if vectors of this size cannot be stored."""
        ...

    def layout(self, extent: Extent) -> dict[str, Plane]: ...

    def bits_per_value(self, dim: int) -> float:
        """Return the bits per value of long arrays, overhead included; `EncodedArray.nbytes` is exact."""
        ...

    def encode(self, x: mx.array, position: int = 0) -> EncodedArray: ...

    def decode(self, encoded: EncodedArray, dtype: mx.Dtype) -> mx.array:
        """-> [..., tokens, dim]"""
        ...

    def scores(self, q: mx.array, encoded: EncodedArray) -> mx.array:
        """q [..., queries, dim] against keys -> float32 [..., queries, tokens]"""
        ...

    def mix(self, p: mx.array, encoded: EncodedArray) -> mx.array:
        """p [..., queries, tokens] with values -> float32 [..., queries, dim]"""
        ...

    def join(self, a: EncodedArray, b: EncodedArray) -> EncodedArray:
        """Join `a` and `b`, which follows it. Nothing is encoded anew."""
        ...


class StockProducts(Protocol):
    """Codec with products of MLX's own operations over encoded arrays."""

    def decode(self, encoded: EncodedArray, dtype: mx.Dtype) -> mx.array: ...

    def scores_packed(self, q: mx.array, encoded: EncodedArray) -> mx.array: ...

    def mix_packed(self, p: mx.array, encoded: EncodedArray) -> mx.array: ...


class StockPlanes(StockProducts, Protocol):
    """Codec of planes with MLX's own operations."""

    @property
    def bits(self) -> int: ...

    @property
    def rotation(self) -> RopeRotation | None: ...

    def encode_by_mlx(self, x: mx.array, position: int) -> dict[str, mx.array]: ...

    def decode_by_mlx(self, encoded: EncodedArray, dtype: mx.Dtype) -> mx.array: ...

    def decode_stock(self, encoded: EncodedArray) -> mx.array: ...

    def means_of(self, encoded: EncodedArray) -> RopeMeans: ...

    def has_products(self, dim: int) -> bool:
        """Whether MLX's quantized products take vectors of this size."""
        ...


def check_input(codec: Codec, x: mx.array, position: int) -> None:
    if x.dtype not in FLOATS:
        raise MismatchedArrays(f"{codec.name} encodes float32, float16 and bfloat16, not {x.dtype}.")
    if x.ndim < 2 or x.shape[-2] < 1:
        raise MismatchedArrays(f"{codec.name} encodes [..., tokens, dim] with at least one token, not {x.shape}.")
    if position < 0:
        raise MismatchedArrays(f"A position is 0 or more, not {position}.")
    codec.check(x.shape[-1])


def check_queries(q: mx.array, encoded: EncodedArray, width: int) -> None:
    if q.ndim < 2 or q.shape[:-2] != encoded.leading or q.shape[-1] != width:
        wanted = (*encoded.leading, "any", width)
        raise MismatchedArrays(f"{encoded.name} needs an array of shape {wanted} here, not {q.shape}.")


def finite(x: mx.array) -> mx.array:
    """Convert to float32 within float16's range, NaN to 0."""
    x = x.astype(mx.float32)
    return mx.clip(mx.where(mx.isnan(x), 0.0, x), -LARGEST, LARGEST)


def half(x: mx.array) -> mx.array:
    return mx.minimum(x, LARGEST).astype(mx.float16)


def own(
    codec: Codec, arrays: dict[str, mx.array], x: mx.array, position: int, mean_runs: MeanRuns = ()
) -> EncodedArray:
    """Make planes of arrays that are evaluated now, so that nothing keeps `x` alive."""
    mx.eval(list(arrays.values()))
    return EncodedArray(codec, arrays, x.shape[-2], position, x.shape[-1], mean_runs)


def copy_rows(array: mx.array, start: int, end: int) -> mx.array:
    """Copy rows [start, end) bit for bit to memory of their own.

    The copy operates on the bits, because `mx.contiguous` shares a parent's buffer that is up to 16 KB larger.
    """
    bits = array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.itemsize])
    return (bits[..., start:end, :] | 0).view(array.dtype)


def check_neighbours(a: EncodedArray, b: EncodedArray) -> None:
    if a.codec != b.codec:
        raise MismatchedArrays(f"{a.name} and {b.name} cannot be joined: step the higher one down first.")
    if a.end != b.position:
        raise MismatchedArrays(f"Tokens from {b.position} on do not follow those that end at {a.end}.")
    for name, array in a.arrays.items():
        other = b.arrays[name]
        if (array.shape[:-2], array.shape[-1], array.dtype) != (other.shape[:-2], other.shape[-1], other.dtype):
            raise MismatchedArrays(
                f"Plane {name!r} of {a.name} cannot be joined: "
                f"{array.shape} {array.dtype} and {other.shape} {other.dtype}."
            )


def join_plain(a: EncodedArray, b: EncodedArray) -> EncodedArray:
    check_neighbours(a, b)
    arrays = {name: mx.concatenate([array, b.arrays[name]], axis=-2) for name, array in a.arrays.items()}
    mx.eval(list(arrays.values()))
    return EncodedArray(a.codec, arrays, a.num_tokens + b.num_tokens, a.position, a.dim)


def _check_plane(what: str, array: mx.array, plane: Plane) -> None:
    if array.ndim < 2 or array.shape[-2:] != (plane.rows, plane.width):
        raise MismatchedArrays(f"{what} is [..., {plane.rows}, {plane.width}], not {array.shape}.")
    if array.dtype not in plane.dtypes:
        raise MismatchedArrays(f"{what} is {' or '.join(map(str, plane.dtypes))}, not {array.dtype}.")
