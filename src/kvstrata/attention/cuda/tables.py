"""Tables of a decode step on CUDA: the tokens of segments that each row reads. step.cuh describes their columns.

All tables but `places` stay unchanged while the rows read the same segments, and layers that are stored alike share
them. Lengths are rounded up, short ones to those of a usual batch, because a step of a new shape is traced first, which
takes as long as several steps. Knows numbers only, no arrays of keys or values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.segments import SlotPlace
from kvstrata.codecs.cuda.kernels import ENTRY, WARPS
from kvstrata.codecs.cuda.planes import RAW_BITS, piece_rows, piece_tokens
from kvstrata.codecs.mean_runs import MeanRuns

# Fewest entries of a table, and fewest blocks of a launch: for a row, limited by those of all rows together. Blocks
# without a piece end at once.
_FEWEST_PIECES = 256

_FEWEST_SEGMENTS = 64

_ROW_BLOCKS, _ALL_BLOCKS = 32, 1024


class SegmentForm(NamedTuple):
    """Storage form of a segment's arrays. Segments of the same form differ only in their addresses."""

    k_bits: int
    v_bits: int
    num_tokens: int  # of the arrays
    mean_runs: tuple[MeanRuns, MeanRuns] = ((), ())  # of keys and of values; empty for raw vectors
    offset: int = 0  # of token 0 in the group that shares a mean
    rotation: tuple[int, int, int] = (0, 0, 0)  # RoPE rotation: pairs, first dim, whether a pair are neighbours


def raw_kind(num_tokens: int) -> SegmentForm:
    return SegmentForm(RAW_BITS, RAW_BITS, num_tokens)


class RowReads(NamedTuple):
    """Tokens that a row reads beside its own buffer, and that buffer; segments are given by number."""

    reads: tuple[tuple[int, int, int], ...]  # segment, first token, end
    own: int


class StepTables(NamedTuple):
    """All tables of the kernel but `places`."""

    pieces: mx.array  # int32 [pieces, 8]
    kinds: mx.array  # int32 [segments, 8]
    rows: tuple[tuple[int, int, int], ...]  # of each row: its own buffer, its first piece, the number of its pieces


class PlaceTable(NamedTuple):
    table: mx.array  # int32 [rows, 8]
    num_blocks: int  # of the row with most blocks, rounded up


@lru_cache(maxsize=32)
def tables_of(kinds: tuple[SegmentForm, ...], rows: tuple[RowReads, ...], heads: int) -> StepTables:
    num_heads = len(rows) * heads
    found: list[np.ndarray] = []
    placed, first = [], 0
    for row in rows:
        mine = [_pieces(number, kinds[number], start, end, num_heads) for number, start, end in row.reads]
        count = sum(map(len, mine))
        placed.append((row.own, first, count))
        found += mine
        first += count
    pieces = np.concatenate(found) if found else _NOTHING
    return StepTables(
        _padded(pieces, table_length(len(pieces), _FEWEST_PIECES)),
        _padded(_kind_rows(kinds), segment_table_length(len(kinds))),
        tuple(placed),
    )


def places_of(tables: StepTables, places: Sequence[SlotPlace], heads: int) -> PlaceTable:
    longest, num_heads = max([place.num_tokens for place in places]), len(places) * heads
    fewest = min(_ROW_BLOCKS, max(1, _ALL_BLOCKS // num_heads))
    return _places(tables.rows, tuple(places), piece_tokens(longest, num_heads), fewest)


@lru_cache(maxsize=64)
def _places(
    rows: tuple[tuple[int, int, int], ...], places: tuple[SlotPlace, ...], size: int, fewest: int
) -> PlaceTable:
    table = np.zeros((len(rows), ENTRY), np.int32)
    table[:, [0, 4, 5]] = rows
    table[:, 1:3] = places
    table[:, 3] = size
    num_pieces = table[:, 5] - (-table[:, 2] // size)
    return PlaceTable(mx.array(table), rounded_up(max(fewest, -(-int(num_pieces.max()) // WARPS))))


def segment_table_length(num_segments: int) -> int:
    """Return the length of tables that have an entry for each segment."""
    return table_length(num_segments, _FEWEST_SEGMENTS)


def table_length(number: int, fewest: int) -> int:
    return max(fewest, 1 << (number - 1).bit_length() if number else 0)


def rounded_up(number: int) -> int:
    """Round up to a power of two, or to one and a half of it."""
    size = 1
    while size < number:
        if size >= 2 and size + size // 2 >= number:
            return size + size // 2
        size *= 2
    return size


_NOTHING = np.zeros((0, ENTRY), np.int32)


def _pieces(number: int, kind: SegmentForm, start: int, end: int, num_heads: int) -> np.ndarray:
    size = piece_tokens(end - start, num_heads)
    if kind.k_bits == kind.v_bits == RAW_BITS:
        firsts = np.arange(start, end, size)
        known = np.zeros((len(firsts), 5), np.int32)
        known[:, 0], known[:, 1] = firsts, np.minimum(size, end - firsts)
    else:
        known = piece_rows(kind.mean_runs, kind.offset, start, end, size)
    rows = np.zeros((len(known), ENTRY), np.int32)
    rows[:, 0], rows[:, 1:6] = number, known
    return rows


def _kind_rows(kinds: Sequence[SegmentForm]) -> np.ndarray:
    return np.array(
        [(k.k_bits, k.v_bits, k.num_tokens, len(k.mean_runs[0]), len(k.mean_runs[1]), *k.rotation) for k in kinds],
        np.int32,
    )


def _padded(rows: np.ndarray, length: int) -> mx.array:
    return mx.array(np.concatenate([rows, np.zeros((length - len(rows), ENTRY), np.int32)]))
