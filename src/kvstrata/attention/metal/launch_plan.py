"""Plans of decode steps: the launches of the portable kernel, the reads of each launch, and the tables of numbers.

Segments of all rows are distributed over launches by their arrays, because Metal binds at most 31 buffers. A plan
consists of numbers alone, so all layers of a step that read alike share one plan. The module never reads contents of
arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.codecs.cuda.planes import pieces_of
from kvstrata.codecs.mean_runs import MeanRuns
from kvstrata.codecs.metal import kernel_text as metal_kernel_text
from kvstrata.codecs.metal.kernel_text import LANES, RAW_KINDS, ArrayCounts, Dialect, HeadSizes, KernelText
from kvstrata.codecs.metal.planes import angles_of, head_numbers
from kvstrata.codecs.rope import RopeRotation

MOST_BUFFERS = 31  # of a launch, on Metal

OTHER_BUFFERS = 4  # queries, table, angles, result

# Shapes of launches. They are few, because each is compiled when a server starts. The smallest that fits is used.
SHAPES = (
    ArrayCounts(0, 0, 8),
    ArrayCounts(0, 0, 26),
    ArrayCounts(6, 4, 16),
    ArrayCounts(12, 8, 6),
    ArrayCounts(12, 12, 2),
)

PARTIAL_COUNTS = (1, 2, 4, 8, 16)  # numbers of partial results that a launch combines

ENOUGH_GROUPS = 1024  # to keep a GPU busy

LONGEST_PIECE, SHORTEST_PIECE = 256, 32

MOST_SPLITS = 64  # of a row: the combining launch loops over them

SPLITS_AT, PIECE_NUMBERS = 16, 12  # as in attend_body.h


class HeadForm(NamedTuple):
    k_dim: int
    v_dim: int
    kv_heads: int


class MeanForm(NamedTuple):
    mean_runs: tuple[MeanRuns, MeanRuns]  # of keys and of values
    counts: tuple[int, int]  # of means, for each head
    offset: int  # of token 0 in the group that shares a mean
    rotation: RopeRotation | None  # RoPE rotation of the keys' means


@dataclass(frozen=True, eq=False)
class StorageForm:
    """Storage form of keys and values. `storage_form` makes one object for each form, which is its own key."""

    form: HeadForm
    k_kind: int  # as in source/vectors.h
    v_kind: int
    mean: MeanForm

    @property
    def rotation(self) -> RopeRotation | None:
        return self.mean.rotation

    @property
    def kinds(self) -> int:
        return self.k_kind | self.v_kind << 8 | (self.rotation is not None) << 16

    @property
    def sorts(self) -> str:
        """Sorts of the arrays, a letter for each: w (words of codes), h (halves), r (raw vectors)."""
        return "".join("r" if kind > 8 else "w" * _NUM_PLANES[kind] + "hh" for kind in (self.k_kind, self.v_kind))


_NUM_PLANES = {8: 3, 4: 2, 2: 1}

_NO_MEAN = MeanForm(((), ()), (1, 1), 0, None)


@lru_cache(maxsize=1024)
def storage_form(form: HeadForm, k_kind: int, v_kind: int, mean: MeanForm | None = None) -> StorageForm:
    return StorageForm(form, k_kind, v_kind, mean or _NO_MEAN)


class NumberedRead(NamedTuple):
    """Tokens [start, end) of a segment of `row`."""

    row: int
    stored_as: StorageForm
    start: int
    end: int
    size: int


class StepShape(NamedTuple):
    num_rows: int
    heads: int
    k_dim: int
    scale: float
    dtype: mx.Dtype
    sinks: mx.Dtype | None
    dialect: Dialect


class PartialLaunch(NamedTuple):
    """A launch that attends over some of the segments."""

    text: KernelText
    table: mx.array
    angles: mx.array
    arrays: tuple[int, ...]  # by their index among the arrays of all reads
    groups: tuple[int, int, int]
    shape: tuple[int, ...]


class CombineLaunch(NamedTuple):
    """The launch that combines the partial results."""

    text: KernelText
    ranges: mx.array
    num_partials: int
    groups: tuple[int, int, int]
    shape: tuple[int, ...]


class LaunchPlan(NamedTuple):
    launches: tuple[PartialLaunch, ...]
    combine: CombineLaunch


# Holds a few steps, each with the kinds of layer that a model has: every new token changes the plans.
@lru_cache(maxsize=32)
def plan(
    reads: tuple[tuple[int, StorageForm, int, int, int], ...],  # see `NumberedRead`
    same: tuple[int, ...],  # for each array of each read, the first index at which this array occurs
    asked: StepShape,
) -> LaunchPlan | None:
    """Plan a decode step of one layer. None: the kernel does not take it."""
    numbers = [NumberedRead(*read) for read in reads]
    form = numbers[0].stored_as.form
    if any(read.stored_as.form != form for read in numbers) or form.k_dim != asked.k_dim:
        return None
    loads = contents_of(numbers, same)
    if len(loads) > PARTIAL_COUNTS[-1]:
        return None
    sizes = HeadSizes(form.k_dim, form.v_dim, asked.heads // form.kv_heads)
    num_tokens = sum(read.end - read.start for read in numbers)
    cut = cut_of(num_tokens * form.kv_heads * sizes.num_tiles, num_tokens // asked.num_rows)
    launches, ranges = [], []
    for load in loads:
        text = metal_kernel_text.attend_text(asked.dialect, sizes, load.shape, load.raw_dtypes())
        table = table_of(load, asked, cut)
        groups = (table.num_splits, form.kv_heads, sizes.num_tiles)
        shape = (table.num_splits, asked.heads, form.v_dim + 2)
        angles = angles_of(load.rotation, form.k_dim)
        launches.append(PartialLaunch(text, table.numbers, angles, load.buffers(), groups, shape))
        ranges.append(table.ranges)
    return LaunchPlan(tuple(launches), _last(asked, form, ranges))


def _last(asked: StepShape, form: HeadForm, ranges: Sequence[Sequence[tuple[int, int]]]) -> CombineLaunch:
    count = next(count for count in PARTIAL_COUNTS if count >= len(ranges))
    text = metal_kernel_text.combine_text(asked.dialect, form.v_dim, asked.dtype, count, asked.sinks)
    numbers = np.zeros((asked.num_rows, count, 2), np.int32)
    numbers[:, : len(ranges)] = np.array(ranges, np.int32).swapaxes(0, 1)
    table = mx.array(np.concatenate([np.array([asked.heads, *[0] * 7], np.int32), numbers.ravel()]))
    groups = (-(-form.v_dim // LANES), asked.num_rows * asked.heads, 1)
    return CombineLaunch(text, table, count, groups, (asked.num_rows, asked.heads, 1, form.v_dim))


@dataclass(eq=False)
class LaunchContents:
    """The reads of a launch that is being composed."""

    rotation: RopeRotation | None = None
    # Indices of arrays, in the order of their slots. An array of several reads is passed once.
    words: list[int] = field(default_factory=list)
    halves: list[int] = field(default_factory=list)
    raw: list[int] = field(default_factory=list)
    segments: list[tuple[NumberedRead, list[int]]] = field(default_factory=list)  # with the slots of its arrays

    def add(self, read: NumberedRead, arrays: Sequence[int]) -> bool:
        """Add a read if the launch can take it, and return whether it can."""
        rotation = read.stored_as.rotation
        if rotation is not None and self.rotation is not None and rotation != self.rotation:
            return False
        sorts = {"w": list(self.words), "h": list(self.halves), "r": list(self.raw)}
        slots = []
        for letter, number in zip(read.stored_as.sorts, arrays, strict=True):
            held = sorts[letter]
            if number not in held:
                held.append(number)
            slots.append(held.index(number))
        if shape_for(ArrayCounts(*map(len, sorts.values()))) is None:
            return False
        self.words, self.halves, self.raw = sorts.values()
        self.rotation = self.rotation or rotation
        self.segments.append((read, slots))
        return True

    @property
    def shape(self) -> ArrayCounts:
        shape = shape_for(ArrayCounts(len(self.words), len(self.halves), len(self.raw)))
        assert shape is not None, "what does not fit is not added"
        return shape

    def buffers(self) -> tuple[int, ...]:
        """Indices for all slots. Free slots repeat an array of their sort, or any: the kernel never reads them."""
        anything = self.words or self.raw
        found: list[int] = []
        for held, count in zip((self.words, self.halves, self.raw), self.shape, strict=True):
            found += [*held, *(held or anything)[:1] * (count - len(held))]
        return tuple(found)

    def raw_dtypes(self) -> tuple[mx.Dtype, ...]:
        kinds = {kind for read, _ in self.segments for kind in (read.stored_as.k_kind, read.stored_as.v_kind)}
        return tuple(dtype for dtype, kind in RAW_KINDS.items() if kind in kinds)


def shape_for(wanted: ArrayCounts) -> ArrayCounts | None:
    fitting = (shape for shape in SHAPES if shape.holds(wanted))
    return min(fitting, key=sum, default=None)


def contents_of(reads: Sequence[NumberedRead], same: Sequence[int]) -> list[LaunchContents]:
    """Put each read into the first launch that can take it, those with most arrays first."""
    numbered, at = [], 0
    for read in reads:
        count = len(read.stored_as.sorts)
        numbered.append((read, same[at : at + count]))
        at += count
    loads: list[LaunchContents] = []
    for read, arrays in sorted(numbered, key=lambda each: -len(each[1])):
        if not any(load.add(read, arrays) for load in loads):
            loads.append(LaunchContents())
            added = loads[-1].add(read, arrays)
            assert added, "every read fits a launch of its own"
    for load in loads:
        load.segments.sort(key=lambda each: each[0].row)
    return loads


class SplitSizes(NamedTuple):
    """Division of tokens into pieces, and of pieces into splits."""

    piece_tokens: int
    split_pieces: int


def cut_of(num_keys: int, row_tokens: int) -> SplitSizes:
    """Choose the division of `num_keys`, counted over all rows, heads and tiles of queries: short pieces for little
    work, long splits for much, so that little is left to combine."""
    size = LONGEST_PIECE
    while size > SHORTEST_PIECE and num_keys < ENOUGH_GROUPS * size:
        size //= 2
    pieces = max(1, min(num_keys // (ENOUGH_GROUPS * size), -(-row_tokens // (size * MOST_SPLITS))))
    return SplitSizes(size, pieces)


class LaunchTable(NamedTuple):
    numbers: mx.array  # int32, see attend_body.h
    num_splits: int
    ranges: tuple[tuple[int, int], ...]  # of each row: its first split, and the number of its splits


def table_of(load: LaunchContents, asked: StepShape, cut: SplitSizes) -> LaunchTable:
    pieces: list[np.ndarray] = []
    splits: list[tuple[int, int, int, int]] = []  # row, number of its first piece, how many, kinds
    num_pieces = 0
    for read, slots in load.segments:
        mine = _pieces(read, slots, cut.piece_tokens)
        for first in range(0, len(mine), cut.split_pieces):
            count = min(cut.split_pieces, len(mine) - first)
            splits.append((read.row, num_pieces + first, count, read.stored_as.kinds))
        pieces.append(mine)
        num_pieces += len(mine)
    places = np.array(splits, np.int32)
    places[:, 1] = SPLITS_AT + 4 * len(splits) + PIECE_NUMBERS * places[:, 1]
    head = _head(load.rotation, asked.scale, load.segments[0][0].stored_as.form.kv_heads)
    table = np.concatenate([head, places.ravel(), np.concatenate(pieces).ravel()])
    rows = places[:, 0]
    ranges = tuple((int(np.searchsorted(rows, row)), int((rows == row).sum())) for row in range(asked.num_rows))
    return LaunchTable(mx.array(table), len(splits), ranges)


def _pieces(read: NumberedRead, slots: Sequence[int], size: int) -> np.ndarray:
    """Table of a read's pieces, int32 [pieces, 12], as in attend_body.h"""
    mean = read.stored_as.mean
    found = np.asarray(pieces_of(mean.mean_runs, mean.offset, read.start, read.end, size))
    pieces = np.zeros((len(found), PIECE_NUMBERS), np.int32)
    pieces[:, 0:2] = found[:, 0:2]
    pieces[:, 2] = read.size
    pieces[:, 3:6] = np.array(_packed(read.stored_as, slots), np.uint32).view(np.int32)
    pieces[:, 6:8] = found[:, 2:4]
    pieces[:, 8:10] = mean.counts
    pieces[:, 10] = found[:, 4]
    return pieces


def _packed(how: StorageForm, slots: Sequence[int]) -> tuple[int, int, int]:
    """Return the slots of keys, of values and of both means: a byte for each array."""
    packed, means, left = [], 0, list(slots)
    for i, kind in enumerate((how.k_kind, how.v_kind)):
        count = _NUM_PLANES.get(kind, 1)
        codes, left = left[:count], left[count:]
        number = sum(slot << 8 * place for place, slot in enumerate(codes))
        if kind <= 8:
            scales, mean, *left = left
            number |= scales << 24
            means |= mean << 8 * i
        packed.append(number)
    return packed[0], packed[1], means


def _head(rotation: RopeRotation | None, scale: float, kv_heads: int) -> np.ndarray:
    """Head of the table, int32 [16]: scale, RoPE rotation, KV heads, signs"""
    numbers = head_numbers(rotation)
    numbers[1:5] = numbers[:4].copy()
    numbers[0] = np.array(scale, np.float32).view(np.int32)
    numbers[5] = kv_heads
    return numbers
