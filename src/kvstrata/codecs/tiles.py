"""Long arrays in tiles, one after the other, where MLX's own operations encode and decode.

Each operation takes memory of its own, some 20 bytes for a value in all. For a whole array at once that would be many
times what is read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from kvstrata.codecs import paths
from kvstrata.codecs.base import Planes
from kvstrata.codecs.segments import GROUP_TOKENS

# More tiles save little: what is read and written is then what counts.
MOST_TILES = 8
# An array of so many values is one tile: its scratch is some MiB.
SMALL_VALUES = 1 << 18


def encode_tiles(
    x: mx.array, position: int, encode: Callable[[mx.array, int], dict[str, mx.array]]
) -> dict[str, mx.array]:
    """Planes of [..., tokens, dim], the first token at `position`. Tiles end where segments do."""
    tiles: list[dict[str, mx.array]] = []
    for start, end in _ranges(position, x.shape[-2], x.size):
        tiles.append(encode(x[..., start:end, :], position + start))
        mx.eval(list(tiles[-1].values()))
    return {name: _joined([tile[name] for tile in tiles]) for name in tiles[0]}


def decode_tiles(planes: Planes, decode: Callable[[Planes], mx.array]) -> mx.array:
    """On CUDA in one piece, and lazily: a prefill there does not stop at each layer."""
    if paths.active() == "cuda":
        return decode(planes)
    tiles: list[mx.array] = []
    ranges = list(_ranges(planes.position, planes.num_tokens, planes.num_values))
    for start, end in ranges:
        tiles.append(decode(planes.view(start, end) if len(ranges) > 1 else planes))
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
