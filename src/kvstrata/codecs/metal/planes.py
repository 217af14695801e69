"""Encode, decode and join planes with the portable kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda.planes import bits_of, piece_rows, pieces_of, rotation_of
from kvstrata.codecs.hadamard import sign_values
from kvstrata.codecs.mean_runs import GROUP_TOKENS, MeanRuns, runs_of
from kvstrata.codecs.metal import kernel_text as metal_kernel_text
from kvstrata.codecs.metal.kernel_text import LARGEST_DIM, RAW_KINDS, ArrayCounts, Dialect, KernelLaunch, Run
from kvstrata.codecs.rope import RopeRotation, tables

PIECE_TOKENS = 32  # of a threadgroup

# MLX passes arrays of fewer entries to Metal in another address space, for which the kernels are not written.
FEWEST_ENTRIES = 8

HEAD_NUMBERS = 16  # numbers of a table before its pieces


def takes(x: mx.array) -> bool:
    """Whether the kernel encodes vectors [..., tokens, dim]."""
    return takes_vectors(x.dtype, x.shape[-1]) and x.size // x.shape[-1] >= FEWEST_ENTRIES


def takes_vectors(dtype: mx.Dtype, dim: int) -> bool:
    return dtype in RAW_KINDS and dim % 16 == 0 and dim <= LARGEST_DIM


def encode(
    x: mx.array,
    bits: int,
    position: int,
    rotation: RopeRotation | None,
    dialect: Dialect,
    run: Run = metal_kernel_text.run_on_gpu,
) -> dict[str, mx.array]:
    """Encode [..., tokens, dim] to the planes of a code of `bits`, scales and means."""
    rows = x.reshape(-1, *x.shape[-2:])
    heads, num_tokens, dim = rows.shape
    mean_runs = runs_of(position, num_tokens)
    offset = position % GROUP_TOKENS
    angles = angles_of(rotation, dim)
    whole, pieces = (_piece_table(mean_runs, offset, rotation, size) for size in (GROUP_TOKENS, PIECE_TOKENS))
    shape = (heads, len(mean_runs), dim)
    text = metal_kernel_text.mean_text(dialect, dim)
    (means,) = run(KernelLaunch(text, [whole, angles, rows], (len(mean_runs), heads, 1), [shape], [mx.float16]))
    text = metal_kernel_text.encode_text(dialect, dim, bits)
    widths = {"top": dim // 16, "next": dim // 16, "low": dim // 8, "scales": 1}
    shapes = [(heads, num_tokens, widths[name]) for name in text.outputs]
    dtypes = [mx.float16 if name == "scales" else mx.uint32 for name in text.outputs]
    groups = (_num_pieces(pieces), heads, 1)
    made = run(KernelLaunch(text, [pieces, angles, rows, means], groups, shapes, dtypes))
    planes = {**dict(zip(text.outputs, made, strict=True)), "means": means}
    return {name: plane.reshape(*x.shape[:-2], *plane.shape[-2:]) for name, plane in planes.items()}


def _num_pieces(table: mx.array) -> int:
    return (table.size - HEAD_NUMBERS) // 5


@lru_cache(maxsize=64)
def _piece_table(mean_runs: MeanRuns, offset: int, rotation: RopeRotation | None, size: int) -> mx.array:
    """int32 table that planes.h reads"""
    head = head_numbers(rotation)
    head[4:6] = sum(mean_runs), len(mean_runs)
    pieces = np.asarray(pieces_of((mean_runs, mean_runs), offset, 0, sum(mean_runs), size))
    return mx.array(np.concatenate([head, pieces.ravel()]))


def head_numbers(rotation: RopeRotation | None) -> np.ndarray:
    """int32 [16]: the first four describe the RoPE rotation, the last eight are signs of the Hadamard rotation."""
    numbers = np.zeros(HEAD_NUMBERS, np.int32)
    if rotation is not None:
        numbers[:4] = (rotation.first, *rotation.strides, rotation.num_pairs)
    negative = np.packbits(sign_values(LARGEST_DIM) < 0, bitorder="little")
    numbers[8:] = negative.view(np.int32)
    return numbers


@lru_cache(maxsize=8)
def angles_of(rotation: RopeRotation | None, dim: int) -> mx.array:
    """float32 [256, dim / 16, 16]: 8 cosines and 8 sines for each of the lanes that share a vector"""
    if rotation is None:
        return mx.array(np.zeros(FEWEST_ENTRIES, np.float32))
    found = tables(rotation, dim)
    both = np.zeros((2, GROUP_TOKENS, dim // 2), np.float32)
    both[0, :, : rotation.num_pairs], both[1, :, : rotation.num_pairs] = found.cos, found.sin
    return mx.array(both.reshape(2, GROUP_TOKENS, dim // 16, 8).transpose(1, 2, 0, 3).copy())


# Array counts of launches: for one prefix and the tokens after it, or all arrays that Metal has buffers for.
SHAPES = (ArrayCounts(3, 2, 1), ArrayCounts(15, 10, 3))

OTHER_BUFFERS = 3  # table, angles, result

PIECE_NUMBERS = 10  # as decode_body.h has them

_NUM_CODES = {8: 3, 4: 2, 2: 1}  # arrays of codes, by bits


class TokenRange(NamedTuple):
    """Tokens [start, end) of planes, or of raw vectors [heads, size, dim]."""

    held: EncodedArray | mx.array
    start: int
    end: int

    @property
    def dim(self) -> int:
        return self.held.dim if isinstance(self.held, EncodedArray) else self.held.shape[-1]

    @property
    def heads(self) -> int:
        return prod(self.held.leading) if isinstance(self.held, EncodedArray) else self.held.shape[0]

    @property
    def rotation(self) -> RopeRotation | None:
        return rotation_of(self.held) if isinstance(self.held, EncodedArray) else None


def takes_encoded(encoded: EncodedArray, dtype: mx.Dtype) -> bool:
    """Whether the kernel decodes planes to vectors of this dtype."""
    fits = "top" in encoded.arrays and encoded.dim <= LARGEST_DIM
    return dtype in RAW_KINDS and fits and min(array.size for array in encoded.arrays.values()) >= FEWEST_ENTRIES


def takes_ranges(ranges: Sequence[TokenRange], dtype: mx.Dtype) -> bool:
    """Whether the kernel joins the ranges to one array of this dtype."""
    dims, rotations = {token_range.dim for token_range in ranges}, {token_range.rotation for token_range in ranges}
    if dtype not in RAW_KINDS or len(dims) != 1 or dims.pop() % 16 or len(rotations - {None}) > 1:
        return False
    return all(
        takes_encoded(held, dtype)
        if isinstance(held, EncodedArray)
        else held.dtype == dtype and held.shape[-1] <= LARGEST_DIM
        for held, _, _ in ranges
    )


def decode(
    encoded: EncodedArray, dtype: mx.Dtype, dialect: Dialect, run: Run = metal_kernel_text.run_on_gpu
) -> mx.array:
    """-> [..., tokens, dim]"""
    out = join([TokenRange(encoded, 0, encoded.num_tokens)], dtype, dialect, run)
    return out.reshape(*encoded.leading, encoded.num_tokens, encoded.dim)


def join(
    ranges: Sequence[TokenRange], dtype: mx.Dtype, dialect: Dialect, run: Run = metal_kernel_text.run_on_gpu
) -> mx.array:
    """Join ranges in order -> [heads, tokens, dim]. If they do not fit one launch, only planes go through launches,
    and the results are concatenated with raw ranges."""
    kind = (ranges[0].heads, ranges[0].dim, dtype)
    load = _Load(dtype)
    if all(load.add(token_range) for token_range in ranges):
        return _decoded(load, *kind, dialect, run)
    made: list[_Load | mx.array] = []
    for token_range in ranges:
        if isinstance(token_range.held, mx.array):
            made.append(token_range.held[:, token_range.start : token_range.end])
        elif not made or isinstance(made[-1], mx.array) or not made[-1].add(token_range):
            made.append(_Load(dtype, token_range))
    arrays = [each if isinstance(each, mx.array) else _decoded(each, *kind, dialect, run) for each in made]
    return mx.concatenate(arrays, axis=1)


class RangeLayout(NamedTuple):
    """Layout of a range in its arrays."""

    bits: int  # 0: raw
    size: int  # tokens of the arrays
    start: int
    end: int
    mean_runs: MeanRuns = ()
    offset: int = 0  # of token 0 in the group that shares a mean
    is_rotated: bool = False


class _Load:
    """Ranges that one launch decodes to vectors of `dtype`."""

    def __init__(self, dtype: mx.Dtype, *ranges: TokenRange) -> None:
        self.rotation: RopeRotation | None = None
        self.stored: list[RangeLayout] = []
        self._dtype = dtype
        self._words: list[mx.array] = []
        self._halves: list[mx.array] = []
        self._raw: list[mx.array] = []
        for token_range in ranges:
            self.add(token_range)

    def add(self, token_range: TokenRange) -> bool:
        """Add a range. Return whether there were slots for its arrays."""
        held, start, end = token_range
        if isinstance(held, mx.array):
            words, halves, raw = [], [], [held]
            stored = RangeLayout(0, held.shape[-2], start, end)
        else:
            words = [held.arrays[name] for name in ("top", "next", "low") if name in held.arrays]
            halves, raw = [held.arrays["scales"], held.arrays["means"]], []
            offset, is_rotated = held.position % GROUP_TOKENS, token_range.rotation is not None
            stored = RangeLayout(bits_of(held), held.num_tokens, start, end, held.mean_runs, offset, is_rotated)
        held_already = (self._words, self._halves, self._raw)
        sizes = [len(before) + len(more) for before, more in zip(held_already, (words, halves, raw), strict=True)]
        if not SHAPES[-1].holds(ArrayCounts(*sizes)):
            return False
        self._words += words
        self._halves += halves
        self._raw += raw
        self.stored.append(stored)
        self.rotation = self.rotation or token_range.rotation
        return True

    @property
    def shape(self) -> ArrayCounts:
        slots = ArrayCounts(len(self._words), len(self._halves), len(self._raw))
        return next(shape for shape in SHAPES if shape.holds(slots))

    def arrays(self) -> list[mx.array]:
        """Return an array for each slot. Unused slots get a small array of the type: a kernel is compiled for types."""
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
    table = _range_table(tuple(load.stored), load.rotation)
    text = metal_kernel_text.decode_text(dialect, dim, load.shape, dtype)
    groups = ((table.size - HEAD_NUMBERS) // PIECE_NUMBERS, heads, 1)
    shape = (heads, sum(stored.end - stored.start for stored in load.stored), dim)
    (out,) = run(KernelLaunch(text, [table, angles_of(load.rotation, dim), *load.arrays()], groups, [shape], [dtype]))
    return out


# Tables of a few chunks, for keys and for values; layers that are stored alike share one.
@lru_cache(maxsize=32)
def _range_table(layouts: tuple[RangeLayout, ...], rotation: RopeRotation | None) -> mx.array:
    """int32 table that decode_body.h reads"""
    rows, total, words, halves, raw = [], 0, 0, 0, 0
    for bits, size, start, end, mean_runs, offset, is_rotated in layouts:
        pieces = piece_rows((mean_runs, mean_runs), offset, start, end, PIECE_TOKENS)
        found = np.zeros((len(pieces), PIECE_NUMBERS), np.int32)
        found[:, 0:2] = pieces[:, 0:2]
        found[:, 2] = size
        if bits:
            codes = range(words, words + _NUM_CODES[bits])
            found[:, 3] = sum(slot << 8 * i for i, slot in enumerate(codes)) | halves << 24
            found[:, 4] = halves + 1
            found[:, 5] = pieces[:, 2]
            found[:, 6] = len(mean_runs)
            found[:, 7] = pieces[:, 4]
            words, halves = codes.stop, halves + 2
        else:
            found[:, 3] = raw
            raw += 1
        found[:, 8] = bits | is_rotated << 8
        found[:, 9] = total - start + pieces[:, 0]
        rows.append(found)
        total += end - start
    head = head_numbers(rotation)
    head[4] = total
    return mx.array(np.concatenate([head, np.concatenate(rows).ravel()]))
