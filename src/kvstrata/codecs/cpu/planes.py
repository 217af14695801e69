"""Planes on a CPU: kernels of our own on MLX's memory, where MLX's quantized kernels are slow.

The kernels need numba (the extra `cpu`); the back-end of a process is "cpu" only with numba. Arrays are evaluated here,
which costs nothing on a CPU. Results are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import mlx.core as mx
import numpy as np

from kvstrata.codecs import mean_runs as runs
from kvstrata.codecs import rope
from kvstrata.codecs.base import LARGEST, finite
from kvstrata.codecs.hadamard import block_of, rotate, rotate_back, sign_values
from kvstrata.codecs.rope import RopeRotation

# For more queries (a prefill) decoding once and BLAS are faster.
FUSED_QUERIES = 16

# Values from which on it pays to wake other threads: below, a thread that wakes late costs more than it saves.
PARALLEL_VALUES = 1 << 18

Codes = tuple[np.ndarray, np.ndarray, np.ndarray]  # top, next, low

_NO_CRUMBS = np.empty((0, 0, 0), np.uint8)

_NO_NIBBLES = np.empty((0, 0, 0), np.uint16)


def warm_up() -> None:
    """Compile every kernel now: the first one that is not cached on disk takes seconds."""
    x, weights, mean_runs = mx.zeros((1, 1, 64)), mx.zeros((1, 1, 1)), (1,)
    arrays = encode_planes(x, 0, None)
    decode_planes(arrays, 8, rope.RopeMeans(x, mean_runs, 0, None))
    score_planes(x, arrays, 8)
    mix_planes(weights, arrays, 8, mean_runs)


def takes_queries(num_queries: int) -> bool:
    """Whether scores and sums are computed faster from the codes than from decoded vectors."""
    return num_queries <= FUSED_QUERIES


def are_computed(arrays: Sequence[mx.array]) -> bool:
    """Evaluate the arrays, because our loops read memory. Return False while MLX traces a function to compile it, when
    there is nothing to evaluate yet."""
    try:
        mx.eval(arrays)
    except ValueError:
        return False
    return True


@contextmanager
def threads_for(*, is_large: bool) -> Iterator[None]:
    """Keep small work on this thread: the others would wake too late."""
    import numba

    if is_large:
        yield
        return
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        yield
    finally:
        numba.set_num_threads(before)


@cache
def hadamard_of(dim: int) -> tuple[np.ndarray, int]:
    """Signs and block of the Hadamard rotation. Signs are copied: numba takes 10 us to recognise a read-only array."""
    return sign_values(dim).copy(), block_of(dim)


# RoPE rotation of means, as the kernels read it: cos and sin [256, pairs], the first rotated dim, the distance from a
# pair to the next, and from the first dim of a pair to its second. Without pairs there is no rotation.
Angles = tuple[np.ndarray, np.ndarray, int, int, int]

_NO_ANGLES: Angles = (np.empty((0, 0), np.float32), np.empty((0, 0), np.float32), 0, 1, 0)


def _angles(rotation: RopeRotation | None, dim: int) -> Angles:
    if rotation is None:
        return _NO_ANGLES
    cos, sin, _ = rope.tables(rotation, dim)
    return (cos, sin, rotation.first, *rotation.strides)


def encode_planes(x: mx.array, position: int, rotation: RopeRotation | None) -> dict[str, mx.array]:
    """Encode float32 [..., tokens, dim] to all three code planes, scales and means."""
    codes, is_plain = _encoded(x, position, rotation)
    if is_plain:
        return codes
    # NaN, infinities and values beyond float16's range must not move the mean.
    means = rope.means_of(mx.where(mx.abs(x) <= LARGEST, x, 0.0), position, rotation)
    return _encoded(finite(x), position, rotation, means.astype(mx.float16))[0]


def _encoded(
    x: mx.array, position: int, rotation: RopeRotation | None, given: mx.array | None = None
) -> tuple[dict[str, mx.array], bool]:
    """Encode around given means, or the vectors' own. Return also whether the result may be used: every value that
    moved a mean was finite and within float16's range."""
    from kvstrata.codecs.cpu import kernels as cpu_kernels

    source, stride = _rows(x)
    tokens, dim = x.shape[-2:]
    mean_runs = runs.runs_of(position, tokens)
    leading, rows = x.shape[:-2], math.prod(x.shape[:-2])
    top, following = np.empty((2, rows, tokens, dim // 4), np.uint8)
    low = np.empty((rows, tokens, dim // 4), np.uint16)
    scales, bounds = np.empty((rows, tokens, 1), np.float32), np.cumsum((0, *mean_runs), dtype=np.int64)
    means = np.empty((rows, len(mean_runs), dim), np.float32)
    if given is not None:
        means[...] = np.asarray(given).reshape(means.shape)
    is_large = rows * tokens * dim >= PARALLEL_VALUES
    where = (source.ctypes.data, stride, position % runs.GROUP_TOKENS, bounds)
    out = (top, following, low, scales)
    with threads_for(is_large=is_large):
        angles = _angles(rotation, dim)
        is_plain = cpu_kernels.encode_planes(where, given is not None, means, angles, *hadamard_of(dim), out)
    words = {"top": top.view(np.uint32), "next": following.view(np.uint32), "low": low.view(np.uint32)}
    halves = {"scales": scales.astype(np.float16), "means": means.astype(np.float16)}
    arrays = {name: _to_mlx(plane, (*leading, plane.shape[1])) for name, plane in {**words, **halves}.items()}
    return arrays, bool(is_plain)


def _rows(x: mx.array) -> tuple[np.ndarray, int]:
    """Return [..., tokens, dim] as rows of tokens without gaps, and the distance between rows in values. A range of a
    buffer is not copied."""
    view = np.asarray(x)
    *outer, token_bytes, value_bytes = view.strides
    tokens, dim = view.shape[-2:]
    if len(outer) != 1 or value_bytes != view.itemsize or token_bytes != dim * view.itemsize:
        return np.ascontiguousarray(view), tokens * dim
    return view, outer[0] // view.itemsize


def decode_planes(arrays: Mapping[str, mx.array], bits: int, means: rope.RopeMeans) -> mx.array:
    """Decode to float32 [..., tokens, dim]."""
    from kvstrata.codecs.cpu import kernels as cpu_kernels

    codes, scales = _views(arrays, bits)
    mx.eval(means.values)
    values = _flat(np.asarray(means.values))
    dim = values.shape[-1]
    centres = (values, runs.ids(means.mean_runs), means.position % runs.GROUP_TOKENS, _angles(means.rotation, dim))
    out = np.empty((*scales.shape, dim), np.float32)
    cpu_kernels.decode_planes(*codes, scales, centres, *hadamard_of(dim), bits, out)
    return _to_mlx(out, arrays["scales"].shape[:-1])


def score_planes(q: mx.array, arrays: Mapping[str, mx.array], bits: int) -> mx.array:
    """q [..., queries, dim] -> [..., queries, tokens], without the contribution of the means"""
    from kvstrata.codecs.cpu import kernels as cpu_kernels

    # The kernels unpack four values of each word at a time: dims 0, 4, 8 ... come first, then 1, 5, 9 ...
    permuted = mx.contiguous(rotate(q).reshape(*q.shape[:-1], -1, 4).swapaxes(-1, -2)).reshape(q.shape)
    mx.eval(permuted)
    codes, scales = _views(arrays, bits)
    out = np.empty((scales.shape[0], q.shape[-2], scales.shape[1]), np.float32)
    cpu_kernels.score_planes(_flat(np.asarray(permuted)), *codes, scales, bits, out)
    return _to_mlx(out, q.shape[:-1])


def mix_planes(p: mx.array, arrays: Mapping[str, mx.array], bits: int, mean_runs: runs.MeanRuns) -> mx.array:
    """p [..., queries, tokens] -> [..., queries, dim]"""
    from kvstrata.codecs.cpu import kernels as cpu_kernels

    mx.eval(p)
    weights = _flat(np.ascontiguousarray(np.asarray(p)))
    codes, scales = _views(arrays, bits)
    dim = arrays["means"].shape[-1]
    chunks = -(-weights.shape[2] // cpu_kernels.CHUNK)
    partial = np.zeros((weights.shape[0], chunks, weights.shape[1], dim), np.float32)
    cpu_kernels.mix_planes(weights, *codes, scales, bits, partial)
    mixed = partial.sum(axis=1).reshape(*p.shape[:-1], 4, dim // 4)
    natural = mx.array(np.ascontiguousarray(mixed.swapaxes(-1, -2))).reshape(*p.shape[:-1], dim)
    starts = np.cumsum((0, *mean_runs[:-1]))
    shares = mx.array(np.add.reduceat(weights, starts, axis=2).reshape(*p.shape[:-1], -1))
    return rotate_back(natural) + shares @ arrays["means"].astype(mx.float32)


def _views(arrays: Mapping[str, mx.array], bits: int) -> tuple[Codes, np.ndarray]:
    """Return (top, next, low), and scales: all with one leading axis, and planes that are not held as empty arrays."""
    mx.eval(list(arrays.values()))
    top = _flat(np.asarray(arrays["top"])).view(np.uint8)
    following = _flat(np.asarray(arrays["next"])).view(np.uint8) if bits > 2 else _NO_CRUMBS
    low = _flat(np.asarray(arrays["low"])).view(np.uint16) if bits > 4 else _NO_NIBBLES
    scales = _flat(np.asarray(arrays["scales"]).astype(np.float32))[:, :, 0]
    return (top, following, low), np.ascontiguousarray(scales)


def _flat(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1, *array.shape[-2:])


def _to_mlx(out: np.ndarray, leading: tuple[int, ...]) -> mx.array:
    return mx.array(out.reshape(*leading, out.shape[-1]))
