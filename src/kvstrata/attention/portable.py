"""Attention of a decode step by the kernel that is written once for Metal, CUDA and tests.

A step is a few launches that each attend over some of the parts, and one that combines what they found. The parts of all
rows are sorted into launches by the arrays that a launch takes: Metal has 31 places for buffers. What lies where is a
table of numbers, the same for every layer of a step. Nothing is written but results.

Knows parts and arrays; does not know sequences, or whether the machine runs the kernels (portable_check.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.cuda import Range, RawRange
from kvstrata.codecs import kernel_text
from kvstrata.codecs.base import Planes
from kvstrata.codecs.cuda_codes import pieces_of, turn_of
from kvstrata.codecs.kernel_text import LARGEST_DIM, RAW_KINDS, Dialect, Launch, Run, Sizes, Slots
from kvstrata.codecs.rotation import sign_values
from kvstrata.codecs.segments import GROUP_TOKENS, Segments
from kvstrata.codecs.turns import Turn, tables

MOST_BUFFERS = 31  # of a launch, on Metal
OTHER_BUFFERS = 4  # queries, table, angles, result
# The shapes that launches have: each is compiled once. The smallest one that holds the parts is taken.
SHAPES = (
    *(Slots(0, 0, 2), Slots(0, 0, 8), Slots(0, 0, 16), Slots(0, 0, 26)),
    *(Slots(6, 4, 2), Slots(6, 4, 16), Slots(12, 8, 6), Slots(8, 8, 10), Slots(12, 12, 2)),
)
PARTIAL_COUNTS = (1, 2, 4, 8, 16, 28)  # of a launch that combines
# MLX passes arrays of fewer entries to Metal in another kind of memory, for which the kernels are not written.
FEWEST_ENTRIES = 8
ENOUGH_GROUPS = 1024  # to keep a GPU busy
LONGEST_PIECE, SHORTEST_PIECE = 256, 32
MOST_SPLITS = 64  # of a row, that combining walks through, unless there are too few groups


class Side(NamedTuple):
    """The keys or the values of a part."""

    kind: int  # as kernel_source/vectors.h has them
    arrays: tuple[mx.array, ...]  # raw: the vectors; planes: top, next, low, scales, means
    num_segments: int
    dim: int

    @property
    def is_coded(self) -> bool:
        return len(self.arrays) > 1


@dataclass(frozen=True, eq=False)
class Read:
    """Tokens [start, end) of arrays [kv_heads, size, ...]."""

    k: Side
    v: Side
    start: int
    end: int
    size: int
    segments: tuple[Segments, Segments]
    offset: int  # of token 0 in the group that shares a mean
    turn: Turn | None


def read_of(part: Range) -> Read | None:
    """None: the kernel does not read it."""
    if isinstance(part, RawRange):
        sides, segments, offset, turn = (_raw_side(part.k), _raw_side(part.v)), ((), ()), 0, None
        size = part.k.shape[2]
        fits = part.k.shape[0] == 1 and part.v.shape[2] == size
    else:
        sides = (_planes_side(part.k), _planes_side(part.v))
        segments, offset = (part.k.segments, part.v.segments), part.k.position % GROUP_TOKENS
        turn, size, fits = turn_of(part.k), part.k.num_tokens, turn_of(part.v) is None
    k, v = sides
    if not fits or k is None or v is None:
        return None
    return Read(k, v, part.start, part.end, size, segments, offset, turn)


def _raw_side(vectors: mx.array) -> Side | None:
    dim, kind = vectors.shape[-1], RAW_KINDS.get(vectors.dtype)
    return Side(kind, (vectors,), 1, dim) if kind and _dim_fits(dim) else None


def _planes_side(planes: Planes) -> Side | None:
    held, dim = planes.arrays, planes.dim
    if "values" in held:
        return _raw_side(held["values"])
    if "top" not in held or not _dim_fits(dim) or len(planes.leading) != 1:
        return None
    arrays = (held["top"], held.get("next", held["top"]), held.get("low", held["top"]), held["scales"], held["means"])
    if min(array.size for array in arrays) < FEWEST_ENTRIES:
        return None
    bits = 8 if "low" in held else 4 if "next" in held else 2
    return Side(bits, arrays, held["means"].shape[-2], dim)


def _dim_fits(dim: int) -> bool:
    return dim % 16 == 0 and dim <= LARGEST_DIM


class Entry(NamedTuple):
    """A part as a launch's table has it: numbers alone, so that layers which read alike share the table."""

    row: int
    kinds: int  # keys | values << 8 | whether the means turn << 16
    start: int
    end: int
    size: int
    slots: tuple[int, int, int]  # of keys, of values, of both means
    segments: tuple[Segments, Segments]
    num_segments: tuple[int, int]
    offset: int


@dataclass(eq=False)
class Load:
    """The parts of one launch, while they are put together."""

    turn: Turn | None = None
    words: dict[int, mx.array] = field(default_factory=dict)  # by id: an array that several read is passed once
    halves: dict[int, mx.array] = field(default_factory=dict)
    raw: dict[int, mx.array] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def add(self, row: int, read: Read) -> bool:
        """Whether there was room."""
        if read.turn is not None and self.turn not in (None, read.turn):
            return False
        new = [{}, {}, {}]
        for side in (read.k, read.v):
            of_words = side.arrays[: _num_planes(side)] if side.is_coded else ()
            for held, arrays in zip(new, (of_words, side.arrays[3:], side.arrays[:1] * (not side.is_coded)), strict=True):
                held.update({id(array): array for array in arrays})
        sorts = (self.words, self.halves, self.raw)
        wanted = Slots(*(len({**held, **more}) for held, more in zip(sorts, new, strict=True)))
        if _shape_for(wanted) is None:
            return False
        for held, more in zip(sorts, new, strict=True):
            for key, array in more.items():
                held.setdefault(key, array)
        self.turn = self.turn or read.turn
        self.entries.append(self._entry(row, read))
        return True

    def _entry(self, row: int, read: Read) -> Entry:
        words, halves, raw = ({key: i for i, key in enumerate(held)} for held in (self.words, self.halves, self.raw))

        def packed(side: Side) -> int:
            if not side.is_coded:
                return raw[id(side.arrays[0])]
            top, following, low, scales, _ = map(id, side.arrays)
            return words[top] | words.get(following, 0) << 8 | words.get(low, 0) << 16 | halves[scales] << 24

        means = [halves[id(side.arrays[4])] if side.is_coded else 0 for side in (read.k, read.v)]
        return Entry(
            row,
            read.k.kind | read.v.kind << 8 | (read.turn is not None) << 16,
            *(read.start, read.end, read.size),
            (packed(read.k), packed(read.v), means[0] | means[1] << 8),
            read.segments,
            (read.k.num_segments, read.v.num_segments),
            read.offset,
        )

    @property
    def shape(self) -> Slots:
        shape = _shape_for(Slots(len(self.words), len(self.halves), len(self.raw)))
        assert shape is not None, "what does not fit is not added"
        return shape

    def buffers(self) -> list[mx.array]:
        """Each sort filled up with its first one."""
        found: list[mx.array] = []
        for held, count in zip((self.words, self.halves, self.raw), self.shape, strict=True):
            arrays = list(held.values()) or [next(iter((self.words or self.halves or self.raw).values()))]
            found += [*arrays, *arrays[:1] * (count - len(arrays))][:count]
        return found

    def raw_dtypes(self) -> tuple[mx.Dtype, ...]:
        return tuple(dtype for dtype in RAW_KINDS if any(array.dtype == dtype for array in self.raw.values()))


def _num_planes(side: Side) -> int:
    return {8: 3, 4: 2, 2: 1}[side.kind]


def _shape_for(wanted: Slots) -> Slots | None:
    return min((shape for shape in SHAPES if shape.holds(wanted)), key=sum, default=None)


def loads_of(rows: Sequence[Sequence[Read]]) -> list[Load]:
    """Each part in the first launch that has room for it, those with most arrays first."""
    parts = [(row, read) for row, reads in enumerate(rows) for read in reads]
    loads: list[Load] = []
    for row, read in sorted(parts, key=lambda part: -len(part[1].k.arrays) - len(part[1].v.arrays)):
        if not any(load.add(row, read) for load in loads):
            loads.append(Load())
            added = loads[-1].add(row, read)
            assert added, "every part fits a launch of its own"
    for load in loads:
        load.entries.sort(key=lambda entry: entry.row)
    return loads


def attend(
    q: mx.array,  # [rows, heads, 1, k_dim]
    rows: Sequence[Sequence[Read]],
    scale: float,
    sinks: mx.array | None = None,  # [heads]
    *,
    dialect: Dialect,
    run: Run = kernel_text.run_on_gpu,
) -> mx.array:
    """One query for each head of each row, over all that the row reads -> [rows, heads, 1, v_dim]"""
    first = rows[0][0]
    num_rows, heads, _, k_dim = q.shape
    kv_heads = first.k.arrays[0].shape[-3]
    sizes = Sizes(k_dim, first.v.dim, heads // kv_heads)
    loads = loads_of(rows)
    num_tokens = sum(read.end - read.start for reads in rows for read in reads)
    cut = _cut(num_tokens * kv_heads * sizes.num_tiles, num_tokens // num_rows)
    partials, ranges = [], []
    for load in loads:
        text = kernel_text.attend_text(dialect, sizes, load.shape, load.raw_dtypes())
        numbers = _table(tuple(load.entries), load.turn, scale, kv_heads, cut, num_rows)
        inputs = [q, numbers.table, _angles(load.turn, k_dim), *load.buffers()]
        shape = (numbers.num_splits, heads, sizes.v_dim + 2)
        partials.append(
            run(Launch(text, inputs, (numbers.num_splits, kv_heads, sizes.num_tiles), shape, mx.float32))
        )
        ranges.append(numbers.ranges)
    return run(_combining(q, sizes, partials, tuple(ranges), sinks, dialect))


def _combining(
    q: mx.array,
    sizes: Sizes,
    partials: list[mx.array],
    ranges: tuple[tuple[tuple[int, int], ...], ...],
    sinks: mx.array | None,
    dialect: Dialect,
) -> Launch:
    num_rows, heads, _, _ = q.shape
    count = next(count for count in PARTIAL_COUNTS if count >= len(partials))
    text = kernel_text.combine_text(dialect, sizes.v_dim, q.dtype, count, None if sinks is None else sinks.dtype)
    others = [] if sinks is None else [sinks]
    padded = [*partials, *partials[:1] * (count - len(partials))]
    groups = (-(-sizes.v_dim // kernel_text.LANES), num_rows * heads, 1)
    inputs = [_ranges(ranges, heads, count), *others, *padded]
    return Launch(text, inputs, groups, (num_rows, heads, 1, sizes.v_dim), q.dtype)


def fits(q: mx.array, rows: Sequence[Sequence[Read | None]]) -> bool:
    """Whether `attend` takes queries and all that the rows read."""
    reads = [read for row in rows for read in row]
    if not all(rows) or q.size < FEWEST_ENTRIES or not reads:
        return False
    known = [read for read in reads if read is not None]
    if len(known) < len(reads) or q.dtype not in RAW_KINDS:
        return False
    dims = {(read.k.dim, read.v.dim) for read in known}
    heads = {side.arrays[0].shape[-3] for read in known for side in (read.k, read.v)}
    return len(dims) == len(heads) == 1 and known[0].k.dim == q.shape[3] and len(rows) == q.shape[0]


class Cut(NamedTuple):
    """How tokens are shared out."""

    piece_tokens: int
    split_pieces: int


def _cut(num_keys: int, row_tokens: int) -> Cut:
    """`num_keys` of all rows, heads and tiles of queries."""
    size = LONGEST_PIECE
    while size > SHORTEST_PIECE and num_keys < ENOUGH_GROUPS * size:
        size //= 2
    pieces = max(1, min(num_keys // (ENOUGH_GROUPS * size), -(-row_tokens // (size * MOST_SPLITS))))
    return Cut(size, pieces)


class Numbers(NamedTuple):
    table: mx.array  # int32, see attend_body.h
    num_splits: int
    ranges: tuple[tuple[int, int], ...]  # of each row: its first split, and how many


_SPLITS_AT = 16


@lru_cache(maxsize=64)
def _table(
    entries: tuple[Entry, ...], turn: Turn | None, scale: float, kv_heads: int, cut: Cut, num_rows: int
) -> Numbers:
    pieces: list[np.ndarray] = []
    splits: list[tuple[int, int, int, int]] = []  # row, number of its first piece, how many, kinds
    num_pieces = 0
    for entry in entries:
        mine = _pieces(entry, cut.piece_tokens)
        for first in range(0, len(mine), cut.split_pieces):
            count = min(cut.split_pieces, len(mine) - first)
            splits.append((entry.row, num_pieces + first, count, entry.kinds))
        pieces.append(mine)
        num_pieces += len(mine)
    table = np.concatenate([_head(turn, scale, kv_heads), _with_places(splits), np.concatenate(pieces).ravel()])
    rows = np.array([split[0] for split in splits])
    ranges = tuple((int(np.searchsorted(rows, row)), int((rows == row).sum())) for row in range(num_rows))
    return Numbers(mx.array(table.astype(np.int32)), len(splits), ranges)


def _with_places(splits: list[tuple[int, int, int, int]]) -> np.ndarray:
    """Pieces by where they are in the table."""
    numbers = np.array(splits, np.int32)
    numbers[:, 1] = _SPLITS_AT + 4 * len(splits) + 12 * numbers[:, 1]
    return numbers.ravel()


def _pieces(entry: Entry, size: int) -> np.ndarray:
    """int32 [pieces, 12], as attend_body.h reads them"""
    found = np.asarray(pieces_of(entry.segments, entry.offset, entry.start, entry.end, size))
    pieces = np.zeros((len(found), 12), np.int32)
    pieces[:, 0:2] = found[:, 0:2]
    pieces[:, 2] = entry.size
    pieces[:, 3:6] = np.array(entry.slots, np.int64).astype(np.uint32).view(np.int32)
    pieces[:, 6:8] = found[:, 2:4]
    pieces[:, 8:10] = entry.num_segments
    pieces[:, 10] = found[:, 4]
    return pieces


def _head(turn: Turn | None, scale: float, kv_heads: int) -> np.ndarray:
    numbers = np.zeros(_SPLITS_AT, np.int32)
    numbers[0] = np.array(scale, np.float32).view(np.int32)
    if turn is not None:
        numbers[1:5] = (turn.first, *turn.strides, turn.num_pairs)
    numbers[5] = kv_heads
    negative = np.packbits(sign_values(LARGEST_DIM) < 0, bitorder="little")
    numbers[8:16] = negative.view(np.int32)
    return numbers


@lru_cache(maxsize=64)
def _ranges(ranges: tuple[tuple[tuple[int, int], ...], ...], heads: int, count: int) -> mx.array:
    """int32, as combine_body.h reads it"""
    numbers = np.zeros((len(ranges[0]), count, 2), np.int32)
    numbers[:, : len(ranges)] = np.array(ranges, np.int32).swapaxes(0, 1)
    return mx.array(np.concatenate([np.array([heads, *[0] * 7], np.int32), numbers.ravel()]))


@lru_cache(maxsize=8)
def _angles(turn: Turn | None, dim: int) -> mx.array:
    """float32 [256, dim / 16, 16]: for each of the lanes that share a vector 8 cosines and 8 sines"""
    if turn is None:
        return mx.array(np.zeros(FEWEST_ENTRIES, np.float32))
    found = tables(turn, dim)
    both = np.zeros((2, GROUP_TOKENS, dim // 2), np.float32)
    both[0, :, : turn.num_pairs], both[1, :, : turn.num_pairs] = found.cos, found.sin
    return mx.array(both.reshape(2, GROUP_TOKENS, dim // 16, 8).transpose(1, 2, 0, 3).copy())

