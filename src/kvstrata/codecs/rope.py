"""The RoPE rotation of keys, and RoPE-aware means.

Keys are stored after RoPE, which rotates pairs of dims by an angle that grows with the position. A component that is
constant before RoPE (a bias of the key projection) is not constant after it, and a plain mean cannot remove it. So the
mean of a group of 256 tokens is taken with every token rotated back to the start of the group, and is rotated to a
token's place before it is subtracted or added. All angles are those of offsets below 256, and exact. Far into a context
a model's own RoPE rounds its angles; the difference becomes part of the residual, which is stored.

The product of a query with a rotated mean is a sum over pairs of dims (a, b) that rotate by w for each token:

    q . R_t m = sum of (q_a m_a + q_b m_b) cos(t w) + (q_b m_a - q_a m_b) sin(t w)

so the products with all tokens of all groups are one product of matrices, with a table that all groups share.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.codecs import mean_runs as runs
from kvstrata.codecs.mean_runs import GROUP_TOKENS, MeanRuns, runs_of

MAX_TABLES = 64  # of models with a few kinds of RoPE rotation each, and of joined planes


@dataclass(frozen=True)
class RopeRotation:
    """RoPE rotation of dims [first, first + 2 * pairs); the other dims are not rotated."""

    first: int
    is_interleaved: bool  # the dims of a pair are neighbours; otherwise the second is `pairs` after the first
    frequencies: bytes  # float32, one for each pair: radians per token

    @property
    def num_pairs(self) -> int:
        return len(self.frequencies) // 4

    @property
    def end(self) -> int:
        return self.first + 2 * self.num_pairs

    @property
    def strides(self) -> tuple[int, int]:
        """Distance from a pair to the next, and from the first dim of a pair to its second."""
        return (2, 1) if self.is_interleaved else (1, self.num_pairs)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first dims of all pairs, and their second dims."""
        step, gap = self.strides
        firsts = self.first + step * np.arange(self.num_pairs)
        return firsts, firsts + gap

    def angles(self, offsets: np.ndarray) -> np.ndarray:
        """float64 [offsets, pairs]"""
        return offsets[:, None].astype(np.float64) * np.frombuffer(self.frequencies, "<f4").astype(np.float64)

    def spec(self) -> dict[str, Any]:
        octets = base64.b64encode(self.frequencies).decode()
        return {"first": self.first, "interleaved": self.is_interleaved, "frequencies": octets}


def rotation_from(spec: object) -> RopeRotation:
    """Read the result of `RopeRotation.spec`. ValueError for anything else."""
    if not isinstance(spec, Mapping):
        raise ValueError(f"a RoPE rotation has a first dim, pairs and their frequencies, not {spec!r}")
    first, is_interleaved, octets = (spec.get(name) for name in ("first", "interleaved", "frequencies"))
    if type(first) is not int or first < 0 or type(is_interleaved) is not bool or not isinstance(octets, str):
        raise ValueError(f"{dict(spec)} does not describe a RoPE rotation")
    try:
        frequencies = base64.b64decode(octets, validate=True)
    except binascii.Error as error:
        raise ValueError("the frequencies of a RoPE rotation are not base64") from error
    if len(frequencies) % 4:
        raise ValueError("the frequencies of a RoPE rotation are not float32")
    return make_rotation(np.frombuffer(frequencies, "<f4"), first=first, is_interleaved=is_interleaved)


def make_rotation(frequencies: np.ndarray, *, first: int = 0, is_interleaved: bool = False) -> RopeRotation:
    numbers = np.asarray(frequencies, "<f4")
    if not len(numbers) or not np.isfinite(numbers).all():
        raise ValueError("a RoPE rotation needs frequencies, all of them finite")
    return RopeRotation(first, is_interleaved, numbers.tobytes())


class RotationTables(NamedTuple):
    cos: np.ndarray  # float32 [256, pairs]
    sin: np.ndarray
    columns: np.ndarray  # float32 [dim, 256]: cos at the first dim of a pair, sin at its second, 1 elsewhere


@lru_cache(maxsize=MAX_TABLES)
def tables(rotation: RopeRotation, dim: int) -> RotationTables:
    angles = rotation.angles(np.arange(GROUP_TOKENS))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    # Kernels read the table in vectors, which may begin near its end.
    room = np.ones(dim * GROUP_TOKENS + 16, np.float32)
    columns = room[:-16].reshape(dim, GROUP_TOKENS)
    firsts, seconds = rotation.pairs()
    columns[firsts], columns[seconds] = cos.T, sin.T
    return RotationTables(cos, sin, columns)


class _Wide(NamedTuple):
    """Tables for MLX's own operations: R_t x = x * cos[t] + x[partner] * sin[t]."""

    cos: mx.array  # float32 [256, dim], 1 at dims without rotation
    sin: mx.array  # negated at the first dim of a pair, 0 at dims without rotation
    columns: mx.array  # [dim, 256]
    partner: mx.array  # int32 [dim]
    is_first: mx.array  # bool [dim]
    is_second: mx.array


@lru_cache(maxsize=MAX_TABLES)
def _wide(rotation: RopeRotation, dim: int) -> _Wide:
    narrow, (firsts, seconds) = tables(rotation, dim), rotation.pairs()
    cos, sin = np.ones((GROUP_TOKENS, dim), np.float32), np.zeros((GROUP_TOKENS, dim), np.float32)
    cos[:, firsts] = cos[:, seconds] = narrow.cos
    sin[:, firsts], sin[:, seconds] = -narrow.sin, narrow.sin
    partner = np.arange(dim, dtype=np.int32)
    partner[firsts], partner[seconds] = seconds, firsts
    arrays = [mx.array(each) for each in (cos, sin, narrow.columns, partner)]
    flags = [mx.array(np.isin(np.arange(dim), which).tolist()) for which in (firsts, seconds)]
    mx.eval(arrays, flags)
    return _Wide(*arrays, *flags)


def means_of(x: mx.array, position: int, rotation: RopeRotation | None) -> mx.array:
    """float32 [..., tokens, dim] -> [..., mean runs, dim], of vectors rotated back to the start of their group"""
    mean_runs = runs_of(position, x.shape[-2])
    if rotation is None:
        return runs.means_of(x, mean_runs)
    wide = _wide(rotation, x.shape[-1])
    offsets = mx.array((position + np.arange(x.shape[-2], dtype=np.int64)) % GROUP_TOKENS)
    back = x * wide.cos[offsets] - x[..., wide.partner] * wide.sin[offsets]
    return runs.means_of(back, mean_runs)


@dataclass(frozen=True)
class RopeMeans:
    """Means of the mean runs of consecutive tokens, the first token at `position`."""

    values: mx.array  # float32 [..., mean runs, dim]
    mean_runs: MeanRuns
    position: int
    rotation: RopeRotation | None

    def centres(self) -> mx.array:
        """Return each token's mean: [..., tokens, dim], or an array that broadcasts to it."""
        if self.rotation is None:
            return runs.spread(self.values, self.mean_runs, axis=-2)
        wide = _wide(self.rotation, self.values.shape[-1])
        cos, sin = (self._narrowed(table, axis=-2) for table in (wide.cos, wide.sin))
        partners = self.values[..., wide.partner]
        turned = self.values[..., None, :] * cos + partners[..., None, :] * sin
        return self._by_token(turned.flatten(-3, -2), axis=-2)

    def shares(self, q: mx.array) -> mx.array:
        """Return the contribution of the means to scores: q [..., queries, dim] -> [..., queries, tokens], or an array
        that broadcasts to it."""
        if self.rotation is None:
            return runs.spread(q @ self.values.swapaxes(-1, -2), self.mean_runs, axis=-1)
        wide = _wide(self.rotation, self.values.shape[-1])
        q, means = q[..., :, None, :], self.values[..., None, :, :]
        straight, crossed = q * means, q * means[..., wide.partner]
        summed = mx.where(wide.is_first, straight + straight[..., wide.partner], straight)
        factors = mx.where(wide.is_second, crossed - crossed[..., wide.partner], summed)
        products = factors @ self._narrowed(wide.columns, axis=-1)
        return self._by_token(products.flatten(-2, -1), axis=-1)

    def _narrowed(self, table: mx.array, axis: int) -> mx.array:
        """Cut a table of 256 offsets to those of the mean run, if there is a single one."""
        if len(self.mean_runs) > 1:
            return table
        start = self.position % GROUP_TOKENS
        end = start + sum(self.mean_runs)
        return table[:, start:end] if axis == -1 else table[start:end]

    def _by_token(self, by_offset: mx.array, axis: int) -> mx.array:
        """256 entries for each mean run -> one for each token"""
        if len(self.mean_runs) == 1:
            return by_offset
        start, num_tokens = self.position % GROUP_TOKENS, sum(self.mean_runs)
        if self.mean_runs == runs_of(self.position, num_tokens):
            return mx.split(by_offset, [start, start + num_tokens], axis=axis)[1]
        return mx.take(by_offset, _entries(self.mean_runs, start), axis=axis)


@lru_cache(maxsize=MAX_TABLES)
def _entries(mean_runs: MeanRuns, start: int) -> mx.array:
    """Index of each token's entry, for planes that were joined inside a group."""
    offsets = (start + np.arange(sum(mean_runs))) % GROUP_TOKENS
    return mx.array((runs.ids(mean_runs) * GROUP_TOKENS + offsets).astype(np.int32))
