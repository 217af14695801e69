"""Trials of the portable kernel on this machine: once for each kind of heads, before anything is served.

Every kernel that a step can use runs beside the path without it, row by row; results are compared and both are timed.
If a kernel fails, is off or is not faster, rows attend one by one. Raw rows and planes are judged separately.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.metal import decode as metal_decode
from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentedKV
from kvstrata.attention.stock import attend_rows
from kvstrata.codecs.backends import Trial, failed, largest, relative_error, runtime
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.metal import kernel_text as metal_kernel_text
from kvstrata.codecs.metal.kernel_text import Dialect, Run
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.rope import make_rotation

Over = Literal["raw", "planes"]

OVER: tuple[Over, ...] = ("raw", "planes")

# Largest errors, as a share of the largest value of a result, which has the model's dtype.
ALLOWED = {mx.float32: 2e-3, mx.float16: 4e-3, mx.bfloat16: 1.5e-2}

SCALE = 0.1

KV_HEADS, TIMED_KV_HEADS = 2, 8

TIMED_ROWS, TIMED_RAW_TOKENS, TIMED_TOKENS, OWN_TOKENS = 8, 1024, 2048, 40

TIMED_LAYERS, TIMED_ROUNDS = 8, 5

# Segments of one row (planes:8, planes:4, raw): each case fills a shape of launches, or needs several launches.
RAW_CASES = ((0, 0, 1), (0, 0, 13), (0, 0, 14), (0, 0, 28), (0, 0, 54), (0, 0, 118))

PLANES_CASES = ((1, 0, 1), (1, 0, 8), (2, 0, 1), (0, 3, 1))

logger = logging.getLogger(__name__)


class DecodeKind(NamedTuple):
    dtype: mx.Dtype
    k_dim: int
    v_dim: int
    group: int  # queries of a KV head


def as_if_tried(dialect: Dialect, run: Run = metal_kernel_text.run_on_gpu) -> AbstractContextManager[None]:
    """Treat the kernel as correct and fast: for tests, and to count what it asks of a GPU."""
    return runtime().attention_kernels.use(dialect, run)


def dialect() -> Dialect | None:
    return runtime().attention_kernels.dialect


def run() -> Run:
    return runtime().attention_kernels.run


def is_used(q: mx.array, rows: Sequence[Sequence[metal_decode.SegmentRead | None]]) -> bool:
    """Whether the kernel is used for queries [rows, heads, 1, k_dim] over these segments."""
    if runtime().attention_kernels:
        return True
    reads = [read for row in rows for read in row]
    first = reads[0] if reads else None
    if first is None or any(read is None for read in reads):
        return False
    form = first.stored_as.form
    raw, planes = trials(DecodeKind(q.dtype, form.k_dim, form.v_dim, q.shape[1] // form.kv_heads))
    has_codes = any(read is not None and len(read.arrays) > 2 for read in reads)
    return planes.is_used if has_codes else raw.is_used


def trials(kind: DecodeKind) -> tuple[Trial, ...]:
    """Return the trials over raw vectors and over planes; run them if they have not run yet."""
    return tuple(runtime().run_once(over, kind, lambda over=over: _logged(_trial(kind, over), kind)) for over in OVER)


def _logged(trial: Trial, kind: DecodeKind) -> Trial:
    log = logger.info if trial.is_used else logger.warning
    log("Attention of decode steps over %s, heads of %d and %d.", trial, kind.k_dim, kind.v_dim)
    return trial


def known_trials(dtype: mx.Dtype, k_dim: int, v_dim: int) -> list[Trial]:
    """Return the trials that have run for such heads, over raw vectors and over planes."""
    return [trial for (_, kind), trial in runtime().trials_of(DecodeKind) if kind[:3] == (dtype, k_dim, v_dim)]


def used() -> list[str]:
    """Names of the kernels that were tried and are used, the same at every start."""
    return sorted(f"{trial.what} {kind}" for (_, kind), trial in runtime().trials_of(DecodeKind) if trial.is_used)


def report(kinds: Collection[DecodeKind]) -> list[dict[str, Any]]:
    """Report the trials for `doctor`; run trials that have not run yet."""
    if dialect() is None:
        return []
    return [{"heads": [str(kind.dtype), *kind[1:]], **trial.as_json()} for kind in kinds for trial in trials(kind)]


def _trial(kind: DecodeKind, over: Over) -> Trial:
    allowed = ALLOWED[kind.dtype]
    try:
        error = _error(kind, over)
        if not error <= allowed:
            return Trial(over, error, allowed)
        ours_ms, stock_ms = _times(kind, over)
    except Exception as failure:  # noqa: BLE001
        # Compilers and drivers raise anything; attention then takes the path without the kernel.
        return failed(over, allowed, failure)
    return Trial(over, error, allowed, ours_ms, stock_ms)


def _error(kind: DecodeKind, over: Over) -> float:
    """Return the largest error of all kernels, with and without sinks."""
    errors = []
    for i, case in enumerate(RAW_CASES if over == "raw" else PLANES_CASES):
        segments = case_segments(kind, *case)
        q = _normal((1, KV_HEADS * kind.group, 1, kind.k_dim), 5, kind.dtype)
        sinks = _normal((KV_HEADS * kind.group,), 6, kind.dtype) if i % 2 else None
        keys = SegmentedKV((segments,))
        errors.append(relative_error(_ours(q, keys, sinks), attend_rows(q, keys, SCALE, sinks)))
    second = case_segments(kind, 1, 1, 2) if over == "planes" else case_segments(kind, 0, 0, 3)
    two = SegmentedKV((case_segments(kind, 0, 0, 2), second))
    q = _normal((2, KV_HEADS * kind.group, 1, kind.k_dim), 7, kind.dtype)
    errors.append(relative_error(_ours(q, two, None), attend_rows(q, two, SCALE, None)))
    return largest(errors)


def _ours(q: mx.array, keys: SegmentedKV, sinks: mx.array | None) -> mx.array:
    found = dialect()
    assert found is not None
    step = metal_decode.step_of(
        q, [[metal_decode.read_of(each) for each in row] for row in keys.rows], SCALE, sinks, found
    )
    if step is None:
        raise ValueError("the kernel does not take heads of this kind")
    return metal_decode.attend(q, step, sinks, run())


def _times(kind: DecodeKind, over: Over) -> tuple[float, float]:
    """Milliseconds of a layer with and without the kernel, for the number of rows at which the kernel gains least."""
    heads = TIMED_KV_HEADS * kind.group
    found = []
    for num_rows in (TIMED_ROWS,) if over == "raw" else (1, TIMED_ROWS):
        keys = SegmentedKV(tuple(_timed_row(kind, over, row) for row in range(num_rows)))
        q = _normal((num_rows, heads, 1, kind.k_dim), 5, kind.dtype)
        mx.eval(q)
        ours, stock = _milliseconds(
            lambda q=q, keys=keys: _ours(q, keys, None), lambda q=q, keys=keys: attend_rows(q, keys, SCALE, None)
        )
        found.append((ours, stock))
    return max(found, key=lambda pair: pair[0] / pair[1])


def _milliseconds(*works: Callable[[], mx.array]) -> list[float]:
    """Milliseconds of a layer for each work: the best of alternating rounds, each a graph of `TIMED_LAYERS` layers."""
    best = [float("inf")] * len(works)
    for number in range(1 + TIMED_ROUNDS):
        for i, work in enumerate(works):
            mx.synchronize()
            began_s = time.perf_counter()
            mx.eval([work() for _ in range(TIMED_LAYERS)])
            mx.synchronize()
            if number:
                best[i] = min(best[i], 1e3 * (time.perf_counter() - began_s) / TIMED_LAYERS)
    return best


def _timed_row(kind: DecodeKind, over: Over, row: int) -> tuple[Segment, ...]:
    if over == "raw":
        return (_raw(kind, TIMED_RAW_TOKENS, row, TIMED_KV_HEADS),)
    shapes = [(TIMED_KV_HEADS, TIMED_TOKENS, dim) for dim in (kind.k_dim, kind.v_dim)]
    k, v = (PlanesCodec(4).encode(_normal(shape, row, kind.dtype)) for shape in shapes)
    return (SealedSegment(k, v), _raw(kind, OWN_TOKENS, row, TIMED_KV_HEADS))


def case_segments(kind: DecodeKind, num_eights: int, num_fours: int, num_raw: int) -> tuple[Segment, ...]:
    """Make the segments of one row. Keys of 8 bits have RoPE-aware means."""
    frequencies = 100.0 ** (-np.arange(kind.k_dim // 2) / kind.k_dim)
    eights = [(PlanesCodec(8, make_rotation(frequencies)), PlanesCodec(8))] * num_eights
    coded = [
        SealedSegment(_encoded(k, kind.k_dim, i, kind), _encoded(v, kind.v_dim, i, kind))
        for i, (k, v) in enumerate([*eights, *[(PlanesCodec(4), PlanesCodec(4))] * num_fours])
    ]
    # Raw segments are short if there are many.
    tokens = 70 if num_raw <= 14 else 9
    return (*coded, *(_raw(kind, tokens + i % 5, i) for i in range(num_raw)))


def _encoded(codec: PlanesCodec, dim: int, seed: int, kind: DecodeKind) -> EncodedArray:
    return codec.encode(_normal((KV_HEADS, 300 + seed, dim), seed, kind.dtype), 11 * seed)


def _raw(kind: DecodeKind, num_tokens: int, seed: int, kv_heads: int = KV_HEADS) -> RawSegment:
    k, v = (_normal((1, kv_heads, num_tokens + 5, dim), 30 + seed, kind.dtype) for dim in (kind.k_dim, kind.v_dim))
    mx.eval(k, v)
    return RawSegment(k, v, num_tokens, 3)


def _normal(shape: tuple[int, ...], seed: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
