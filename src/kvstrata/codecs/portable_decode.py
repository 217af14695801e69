"""Planes to vectors by the kernel that is written once for Metal, CUDA and tests.

One launch decodes whatever lies in so few arrays that it has a place for each: the planes of one part, or several parts
that follow each other, raw ones among them. They become one array. Whether a machine uses the kernel is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.codecs import kernel_text
from kvstrata.codecs.base import Planes
from kvstrata.codecs.cuda_codes import bits_of, piece_rows, turn_of
from kvstrata.codecs.kernel_text import LARGEST_DIM, RAW_KINDS, Dialect, Launch, Run, Slots
from kvstrata.codecs.portable_planes import FEWEST_ENTRIES, HEAD_NUMBERS, PIECE_TOKENS, angles_of, head_numbers
from kvstrata.codecs.segments import GROUP_TOKENS, Segments
from kvstrata.codecs.turns import Turn

# The shapes that launches have: one prefix and what follows it, or as many arrays as Metal has places for.
SHAPES = (Slots(3, 2, 1), Slots(15, 10, 3))
OTHER_BUFFERS = 3  # table, angles, result
PIECE_NUMBERS = 10  # as decode_body.h has them
_NUM_CODES = {8: 3, 4: 2, 2: 1}  # arrays of codes, by bits


class Stretch(NamedTuple):
    """Tokens [start, end) of planes, or of raw vectors [heads, size, dim]."""

    held: Planes | mx.array
    start: int
    end: int

    @property
    def dim(self) -> int:
        return self.held.dim if isinstance(self.held, Planes) else self.held.shape[-1]

    @property
    def heads(self) -> int:
        return prod(self.held.leading) if isinstance(self.held, Planes) else self.held.shape[0]

    @property
    def turn(self) -> Turn | None:
        return turn_of(self.held) if isinstance(self.held, Planes) else None


def takes_planes(planes: Planes) -> bool:
    fits = "top" in planes.arrays and planes.dim <= LARGEST_DIM
    return fits and min(array.size for array in planes.arrays.values()) >= FEWEST_ENTRIES


def takes_stretches(stretches: Sequence[Stretch], dtype: mx.Dtype) -> bool:
    """Whether they become one array of this dtype."""
    dims, turns = {stretch.dim for stretch in stretches}, {stretch.turn for stretch in stretches}
    if dtype not in RAW_KINDS or len(dims) != 1 or dims.pop() % 16 or len(turns - {None}) > 1:
        return False
    return all(
        takes_planes(held) if isinstance(held, Planes) else held.dtype == dtype and held.shape[-1] <= LARGEST_DIM
        for held, _, _ in stretches
    )


def decode(planes: Planes, dtype: mx.Dtype, dialect: Dialect, run: Run = kernel_text.run_on_gpu) -> mx.array:
    """-> [..., tokens, dim]"""
    out = join([Stretch(planes, 0, planes.num_tokens)], dtype, dialect, run)
    return out.reshape(*planes.leading, planes.num_tokens, planes.dim)


def join(
    stretches: Sequence[Stretch], dtype: mx.Dtype, dialect: Dialect, run: Run = kernel_text.run_on_gpu
) -> mx.array:
    """One after the other -> [heads, tokens, dim]. What does not fit one launch is concatenated, and then only codes go
    through launches."""
    kind = (stretches[0].heads, stretches[0].dim, dtype)
    load = _Load(dtype)
    if all(load.add(stretch) for stretch in stretches):
        return _decoded(load, *kind, dialect, run)
    made: list[_Load | mx.array] = []
    for stretch in stretches:
        if isinstance(stretch.held, mx.array):
            made.append(stretch.held[:, stretch.start : stretch.end])
        elif not made or isinstance(made[-1], mx.array) or not made[-1].add(stretch):
            made.append(_Load(dtype, stretch))
    arrays = [each if isinstance(each, mx.array) else _decoded(each, *kind, dialect, run) for each in made]
    return mx.concatenate(arrays, axis=1)


class Stored(NamedTuple):
    """How a stretch lies in arrays."""

    bits: int  # 0: raw
    size: int  # tokens of the arrays
    start: int
    end: int
    segments: Segments = ()
    offset: int = 0  # of token 0 in the group that shares a mean
    turns: bool = False


class _Load:
    """What one launch decodes to vectors of `dtype`."""

    def __init__(self, dtype: mx.Dtype, *stretches: Stretch) -> None:
        self.turn: Turn | None = None
        self.stored: list[Stored] = []
        self._dtype = dtype
        self._words: list[mx.array] = []
        self._halves: list[mx.array] = []
        self._raw: list[mx.array] = []
        for stretch in stretches:
            self.add(stretch)

    def add(self, stretch: Stretch) -> bool:
        """Whether there was room."""
        held, start, end = stretch
        if isinstance(held, mx.array):
            words, halves, raw = [], [], [held]
            stored = Stored(0, held.shape[-2], start, end)
        else:
            words = [held.arrays[name] for name in ("top", "next", "low") if name in held.arrays]
            halves, raw = [held.arrays["scales"], held.arrays["means"]], []
            offset, turns = held.position % GROUP_TOKENS, stretch.turn is not None
            stored = Stored(bits_of(held), held.num_tokens, start, end, held.segments, offset, turns)
        held_already = (self._words, self._halves, self._raw)
        sizes = [len(before) + len(more) for before, more in zip(held_already, (words, halves, raw), strict=True)]
        if not SHAPES[-1].holds(Slots(*sizes)):
            return False
        self._words += words
        self._halves += halves
        self._raw += raw
        self.stored.append(stored)
        self.turn = self.turn or stretch.turn
        return True

    @property
    def shape(self) -> Slots:
        slots = Slots(len(self._words), len(self._halves), len(self._raw))
        return next(shape for shape in SHAPES if shape.holds(slots))

    def arrays(self) -> list[mx.array]:
        """Places that are left get something small of the same type: a kernel is compiled for types."""
        sorts = ((self._words, mx.uint32), (self._halves, mx.float16), (self._raw, self._dtype))
        found: list[mx.array] = []
        for (held, dtype), count in zip(sorts, self.shape, strict=True):
            found += [*held, *[_nothing(dtype)] * (count - len(held))]
        return found


@cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    zeros = mx.zeros((FEWEST_ENTRIES,), dtype)
    mx.eval(zeros)
    return zeros


def _decoded(load: _Load, heads: int, dim: int, dtype: mx.Dtype, dialect: Dialect, run: Run) -> mx.array:
    """[heads, tokens, dim]"""
    table = _stretch_table(tuple(load.stored), load.turn)
    text = kernel_text.decode_text(dialect, dim, load.shape, dtype)
    groups = ((table.size - HEAD_NUMBERS) // PIECE_NUMBERS, heads, 1)
    shape = (heads, sum(stored.end - stored.start for stored in load.stored), dim)
    (out,) = run(Launch(text, [table, angles_of(load.turn, dim), *load.arrays()], groups, [shape], [dtype]))
    return out


# Of some chunks, for keys and for values; layers that are stored alike share one.
@lru_cache(maxsize=32)
def _stretch_table(parts: tuple[Stored, ...], turn: Turn | None) -> mx.array:
    """int32, as decode_body.h reads it"""
    rows, total, words, halves, raw = [], 0, 0, 0, 0
    for bits, size, start, end, segments, offset, turns in parts:
        pieces = piece_rows((segments, segments), offset, start, end, PIECE_TOKENS)
        found = np.zeros((len(pieces), PIECE_NUMBERS), np.int32)
        found[:, 0:2] = pieces[:, 0:2]
        found[:, 2] = size
        if bits:
            codes = range(words, words + _NUM_CODES[bits])
            found[:, 3] = sum(slot << 8 * i for i, slot in enumerate(codes)) | halves << 24
            found[:, 4] = halves + 1
            found[:, 5] = pieces[:, 2]
            found[:, 6] = len(segments)
            found[:, 7] = pieces[:, 4]
            words, halves = codes.stop, halves + 2
        else:
            found[:, 3] = raw
            raw += 1
        found[:, 8] = bits | turns << 8
        found[:, 9] = total - start + pieces[:, 0]
        rows.append(found)
        total += end - start
    head = head_numbers(turn)
    head[4] = total
    return mx.array(np.concatenate([head, np.concatenate(rows).ravel()]))
