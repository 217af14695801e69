"""Attention of a decode step by the portable kernel. Servers run it on Metal only; tests also in its other dialects,
CUDA and plain C++.

A step is a few launches, each over some of the segments, and a launch that combines their results (launch_plan.py). The
kernel writes only results: new tokens are in their buffers already. Whether the machine runs the kernel is decided by
its trials (trials.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from kvstrata.attention.metal.launch_plan import (
    HeadForm,
    LaunchPlan,
    MeanForm,
    StepShape,
    StorageForm,
    plan,
    storage_form,
)
from kvstrata.attention.segments import RawSegment, SealedSegment, Segment, SegmentSlice
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda.planes import rotation_of
from kvstrata.codecs.mean_runs import GROUP_TOKENS
from kvstrata.codecs.metal import kernel_text as metal_kernel_text
from kvstrata.codecs.metal.kernel_text import LARGEST_DIM, RAW_KINDS, Dialect, KernelLaunch, Run
from kvstrata.codecs.metal.planes import FEWEST_ENTRIES


class SegmentRead(NamedTuple):
    """Tokens [start, end) of arrays [kv_heads, size, ...]."""

    stored_as: StorageForm
    start: int
    end: int
    size: int
    arrays: tuple[mx.array, ...]  # of keys, then of values. Raw: the vectors; planes: codes, scales, means


def read_buffers(k: mx.array, v: mx.array, start: int, end: int) -> SegmentRead | None:
    """Return the `SegmentRead` of raw vectors [1, kv_heads, size, dim]. None: the kernel does not read them."""
    (one, kv_heads, size, k_dim), (_, _, v_size, v_dim) = k.shape, v.shape
    k_kind, v_kind = RAW_KINDS.get(k.dtype), RAW_KINDS.get(v.dtype)
    if one != 1 or size != v_size or not (k_kind and v_kind and _dims_fit(k_dim, v_dim)):
        return None
    return SegmentRead(storage_form(HeadForm(k_dim, v_dim, kv_heads), k_kind, v_kind), start, end, size, (k, v))


def read_planes(k: EncodedArray, v: EncodedArray, start: int, end: int) -> SegmentRead | None:
    """Return the `SegmentRead` of sealed tokens, raw or encoded. None: the kernel does not read them."""
    if not _dims_fit(k.dim, v.dim) or len(k.leading) != 1 or rotation_of(v) is not None:
        return None
    kinds = _kind_of(k), _kind_of(v)
    arrays = (*_arrays_of(k), *_arrays_of(v))
    if not all(kinds) or min(array.size for array in arrays) < FEWEST_ENTRIES:
        return None
    mean = None
    if min(kinds) <= 8:
        counts = (_num_means(k), _num_means(v))
        mean = MeanForm((k.mean_runs, v.mean_runs), counts, k.position % GROUP_TOKENS, rotation_of(k))
    return SegmentRead(
        storage_form(HeadForm(k.dim, v.dim, k.leading[0]), *kinds, mean), start, end, k.num_tokens, arrays
    )


def read_of(segment: Segment) -> SegmentRead | None:
    """Return the `SegmentRead` of a segment. None: the kernel does not read it."""
    if isinstance(segment, RawSegment):
        end = segment.start + segment.num_tokens
        return read_buffers(segment.k_buffer, segment.v_buffer, segment.start, end)
    if isinstance(segment, SegmentSlice):
        return segment.views.get(_read_of_slice, segment)
    assert isinstance(segment, SealedSegment)
    return segment.views.get(_read_of_sealed, segment)


def _read_of_slice(segment: SegmentSlice) -> SegmentRead | None:
    whole = read_of(segment.whole)
    return None if whole is None else whole._replace(start=segment.start, end=segment.end)


def _read_of_sealed(segment: SealedSegment) -> SegmentRead | None:
    return read_planes(segment.k, segment.v, 0, segment.num_tokens)


def _num_means(planes: EncodedArray) -> int:
    return planes.arrays["means"].shape[-2] if "means" in planes.arrays else 1


def _kind_of(planes: EncodedArray) -> int:
    """Return the kernel's number for this kind of storage; 0: the kernel does not know it."""
    held = planes.arrays
    if "values" in held:
        return RAW_KINDS.get(held["values"].dtype, 0)
    if "top" not in held:
        return 0
    return 8 if "low" in held else 4 if "next" in held else 2


def _arrays_of(planes: EncodedArray) -> list[mx.array]:
    names = ("values", "top", "next", "low", "scales", "means")
    return [planes.arrays[name] for name in names if name in planes.arrays]


def _dims_fit(*dims: int) -> bool:
    return all(dim % 16 == 0 and dim <= LARGEST_DIM for dim in dims)


class MetalStep(NamedTuple):
    """A planned decode step of one layer."""

    plan: LaunchPlan
    arrays: list[mx.array]  # of all segments of all rows; the plan refers to them by index


def step_of(
    q: mx.array,  # [rows, heads, 1, k_dim]
    rows: Sequence[Sequence[SegmentRead | None]],
    scale: float,
    sinks: mx.array | None,
    dialect: Dialect,
) -> MetalStep | None:
    """Plan a decode step of one layer. None: the kernel does not take it."""
    num_rows, heads, num_queries, k_dim = q.shape
    if num_queries != 1 or num_rows != len(rows) or q.dtype not in RAW_KINDS or q.size < FEWEST_ENTRIES:
        return None
    arrays, numbers = [], []
    for row, reads in enumerate(rows):
        if not reads:
            return None
        for read in reads:
            if read is None:
                return None
            numbers.append((row, *read[:4]))
            arrays += read.arrays
    firsts: dict[int, int] = {}
    same = tuple([firsts.setdefault(id(array), i) for i, array in enumerate(arrays)])
    asked = StepShape(num_rows, heads, k_dim, scale, q.dtype, None if sinks is None else sinks.dtype, dialect)
    found = plan(tuple(numbers), same, asked)
    return None if found is None else MetalStep(found, arrays)


def attend(
    q: mx.array, step: MetalStep, sinks: mx.array | None = None, run: Run = metal_kernel_text.run_on_gpu
) -> mx.array:
    """Attend with one query for each head of each row over the row's segments -> [rows, heads, 1, v_dim]"""
    (launches, last), arrays = step.plan, step.arrays
    partials = []
    for each in launches:
        inputs = [q, each.table, each.angles, *[arrays[i] for i in each.arrays]]
        partials += run(KernelLaunch(each.text, inputs, each.groups, [each.shape], [mx.float32]))
    others = [] if sinks is None else [sinks]
    padding = partials[:1] * (last.num_partials - len(partials))
    inputs = [last.ranges, *others, *partials, *padding]
    (out,) = run(KernelLaunch(last.text, inputs, last.groups, [last.shape], [q.dtype]))
    return out


def attend_rows(
    q: mx.array,
    rows: Sequence[Sequence[SegmentRead | None]],
    scale: float,
    sinks: mx.array | None,
    dialect: Dialect,
    run: Run,
) -> mx.array | None:
    """Attend with q [rows, heads, 1, k_dim], in halves if a step needs more launches than one launch can combine. None:
    the kernel does not take it."""
    step = step_of(q, rows, scale, sinks, dialect)
    if step is not None:
        return attend(q, step, sinks, run)
    if len(rows) == 1:
        return None
    half = len(rows) // 2
    first = attend_rows(q[:half], rows[:half], scale, sinks, dialect, run)
    second = attend_rows(q[half:], rows[half:], scale, sinks, dialect, run)
    return None if first is None or second is None else mx.concatenate([first, second])
