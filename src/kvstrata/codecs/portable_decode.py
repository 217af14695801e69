"""Planes to vectors by the kernel that is written once for Metal, CUDA and tests.

One launch decodes whatever lies in so few arrays that it has a place for each: the planes of one part, or several parts
that follow each other, raw ones among them. They become one array. Whether a machine uses the kernel is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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


def takes(stretches: Sequence[Stretch], dtype: mx.Dtype) -> bool:
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
    """One after the other -> [heads, tokens, dim]"""
    loads = [_Load()]
    for stretch in stretches:
        if not loads[-1].add(stretch):
            loads.append(_Load())
            added = loads[-1].add(stretch)
            assert added, "every part fits a launch of its own"
    heads, dim = stretches[0].heads, stretches[0].dim
    made = [_decoded(load, heads, dim, dtype, dialect, run) for load in loads]
    return made[0] if len(made) == 1 else mx.concatenate(made, axis=1)


class Stored(NamedTuple):
    """How a stretch lies in arrays."""

    bits: int  # 0: raw
    size: int  # tokens of the arrays
    start: int
    end: int
    segments: Segments = ()
    offset: int = 0  # of token 0 in the group that shares a mean
    turns: bool = False


@dataclass(eq=False)
class _Load:
    """What one launch decodes."""

    turn: Turn | None = None
    stored: list[Stored] = field(default_factory=list)
    words: list[mx.array] = field(default_factory=list)
    halves: list[mx.array] = field(default_factory=list)
    raw: list[mx.array] = field(default_factory=list)

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
        sizes = (len(self.words) + len(words), len(self.halves) + len(halves), len(self.raw) + len(raw))
        if not SHAPES[-1].holds(Slots(*sizes)):
            return False
        self.words += words
        self.halves += halves
        self.raw += raw
        self.stored.append(stored)
        self.turn = self.turn or stretch.turn
        return True

    @property
    def shape(self) -> Slots:
        slots = Slots(len(self.words), len(self.halves), len(self.raw))
        return next(shape for shape in SHAPES if shape.holds(slots))

    def arrays(self) -> list[mx.array]:
        """Each sort filled up with its first one, or with any where it has none: that one is never read."""
        anything = self.words or self.raw
        found: list[mx.array] = []
        for held, count in zip((self.words, self.halves, self.raw), self.shape, strict=True):
            found += [*held, *(held or anything)[:1] * (count - len(held))]
        return found


def _decoded(load: _Load, heads: int, dim: int, dtype: mx.Dtype, dialect: Dialect, run: Run) -> mx.array:
    """[heads, tokens, dim]"""
    table = _table(tuple(load.stored), load.turn)
    text = kernel_text.decode_text(dialect, dim, load.shape, dtype)
    groups = ((table.size - HEAD_NUMBERS) // PIECE_NUMBERS, heads, 1)
    shape = (heads, sum(stored.end - stored.start for stored in load.stored), dim)
    (out,) = run(Launch(text, [table, angles_of(load.turn, dim), *load.arrays()], groups, [shape], [dtype]))
    return out


# Of some chunks, for keys and for values; layers that are stored alike share one.
@lru_cache(maxsize=32)
def _table(parts: tuple[Stored, ...], turn: Turn | None) -> mx.array:
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
