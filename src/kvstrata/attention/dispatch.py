"""Dispatch of attention: the path of each operation, native kernels first, and the hook in mlx-lm's models.

A layer's cache hands the model a `SegmentedKV` or a `StepInput` in place of keys and values. Models pass them to
`scaled_dot_product_attention`, which they import by name; `install` rebinds that name to `attend`. Plain arrays go to
mlx-lm's own function, so mlx-lm's caches keep working in the same process, and layers that share another layer's keys
need no cache of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models import base

from kvstrata.attention import stock
from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda import join as cuda_join
from kvstrata.attention.cuda import prefill as cuda_prefill
from kvstrata.attention.cuda import ranges as cuda_ranges
from kvstrata.attention.cuda import step as cuda_step
from kvstrata.attention.cuda import trials as cuda_trials
from kvstrata.attention.cuda.step import LaunchState, PlannedReads
from kvstrata.attention.metal import decode as metal_decode
from kvstrata.attention.metal import trials as metal_trials
from kvstrata.attention.segments import (
    DecodeRow,
    RawSegment,
    SealedSegment,
    Segment,
    SegmentedKV,
    SegmentSlice,
    has_codes,
)
from kvstrata.codecs import dispatch as codec_dispatch
from kvstrata.codecs.backends import NOT_TRIED, HeadKind, KernelChoice, checked_once, known_result, no_kernels, runtime
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda.planes import tiles_for
from kvstrata.codecs.metal.planes import TokenRange
from kvstrata.platform.rebinding import rebind

logger = logging.getLogger(__name__)


class StepInput(Protocol):
    """New tokens, one for each row, that a kernel writes with the attention. Replaces both keys and values."""

    @property
    def launched(self) -> Sequence[mx.array]:
        """Arrays that have to be issued when the pass ends."""
        ...

    def takes(self, queries: mx.array) -> bool:
        """Whether `attend` takes these queries."""
        ...

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Write the new tokens, once, and attend to all tokens."""
        ...

    def write(self) -> Sequence[DecodeRow]:
        """Write the new tokens; for readers of the rows that take another path."""
        ...


_STEP_INPUTS = (cpu_step.CpuStep, cuda_step.CudaStep, cuda_step.PreparedStep)

Keys = SegmentedKV | StepInput


class ChunkKeys(NamedTuple):
    """Keys of one chunk of a prompt."""

    kv: SegmentedKV
    num_tokens: int
    mask: mx.array | str | None


@dataclass(frozen=True)
class MixedKeys:
    """Keys of a mixed pass: chunks of prompts and decode rows. Replaces both keys and values, as `SegmentedKV` does."""

    chunks: tuple[ChunkKeys, ...]
    rows: Keys | None  # None: the pass has no decode rows


def as_chunk(tokens: mx.array) -> mx.array:
    """Swap [tokens, heads, 1, dim] <-> [1, heads, tokens, dim]."""
    return tokens.swapaxes(0, 2)


def install() -> int:
    """Make models call `attend`, and return how many modules call it. Call it after a model was loaded."""
    return rebind(base.scaled_dot_product_attention, attend)


def attend(
    queries: mx.array,  # [rows, heads, tokens, k_dim]
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,  # an array, "causal" or None
    sinks: mx.array | None = None,
) -> mx.array:
    if isinstance(keys, MixedKeys):
        return _attend_mixed(queries, keys, scale, sinks)
    if isinstance(keys, _STEP_INPUTS):
        if mask is None and keys.takes(queries):
            return keys.attend(queries, scale, sinks)
        keys = SegmentedKV(tuple(row.segments() for row in keys.write()))
    if not isinstance(keys, SegmentedKV):
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    if queries.shape[2] == 1 and mask is None:
        return decode(queries, keys, scale, sinks)
    return prefill(queries, keys, scale, mask, sinks)


def _attend_mixed(queries: mx.array, keys: MixedKeys, scale: float, sinks: mx.array | None) -> mx.array:
    """Attend with the tokens of each chunk as a chunk, and with the decode rows as a decode step."""
    out, start = [], 0
    for kv, count, mask in keys.chunks:
        chunk = as_chunk(queries[start : start + count])
        if count == 1 and mask is None and runtime().backend == "cuda":
            mask = "causal"  # as in longer chunks: otherwise MLX compiles kernels for one token, for seconds
        out.append(as_chunk(attend(chunk, kv, kv, None, scale, mask, sinks)))
        start += count
    if keys.rows is not None:
        out.append(attend(queries[start:], keys.rows, keys.rows, None, scale, None, sinks))
    return mx.concatenate(out)


def begin_step(rows: Sequence[DecodeRow], k: mx.array, v: mx.array, state: LaunchState) -> StepInput | None:
    """Return the step whose kernel writes new tokens [rows, kv_heads, 1, dim] and attends. None: MLX has to write."""
    if (step := cpu_step.begin_step(rows, k, v)) is not None:
        return step
    if cuda_trials.step_takes(k, v):
        return cuda_step.CudaStep(rows, k, v, state)
    return None


def attend_next(
    rows: Sequence[DecodeRow], q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> np.ndarray | None:
    """Write one new token for each row and attend, all in numpy arrays [rows, heads, 1, dim]. None: only MLX can."""
    return cpu_step.attend_next(rows, q, k, v, scale)


def plan_layer(rows: Sequence[DecodeRow], state: LaunchState) -> PlannedReads | None:
    """Find what the launch of one layer reads, before the model is called. None: no launch can read it."""
    return cuda_step.plan_reads(rows, state, cuda_trials.step_works)


def decode(q: mx.array, kv: SegmentedKV, scale: float, sinks: mx.array | None) -> mx.array:
    """Attend with q [rows, heads, 1, k_dim], one query for each row, over all segments of the row."""
    if (dialect := metal_trials.dialect()) is not None and not _is_one_buffer(kv):
        try:
            rows = [[metal_decode.read_of(segment) for segment in segments] for segments in kv.rows]
            if metal_trials.is_used(q, rows):
                out = metal_decode.attend_rows(q, rows, scale, sinks, dialect, metal_trials.run())
                if out is not None:
                    return out
        except Exception as failure:  # noqa: BLE001
            # A step must not fail for the sake of speed.
            _warn_once(f"{type(failure).__name__}: {failure}")
    return decode_row_by_row(q, kv, scale, sinks)


def _is_one_buffer(kv: SegmentedKV) -> bool:
    """Whether the only segment is a raw buffer, which MLX attends to in one operation."""
    return len(kv.rows) == 1 and len(kv.rows[0]) == 1 and isinstance(kv.rows[0][0], RawSegment)


@checked_once
def _warn_once(reason: str) -> None:
    logger.warning("Batches attend by sequence, which is slower: a step could not be planned: %s", reason)


def decode_row_by_row(q: mx.array, kv: SegmentedKV, scale: float, sinks: mx.array | None) -> mx.array:
    """Attend as `decode` does, without a kernel for a whole batch."""
    return stock.attend_rows(q, kv, scale, sinks, _decode_row)


def _decode_row(q: mx.array, segments: Sequence[Segment], scale: float, sinks: mx.array | None) -> mx.array:
    if runtime().backend == "cuda" and not (len(segments) == 1 and isinstance(segments[0], RawSegment)):
        ranges = [cuda_ranges.range_of(segment) for segment in segments]
        if cuda_ranges.fit_together(ranges):
            return cuda_ranges.attend(q, ranges, scale, sinks)
    return stock.attend_row(q, segments, scale, sinks, cpu_step.softmax)


def prefill(
    q: mx.array, kv: SegmentedKV, scale: float, mask: mx.array | str | None, sinks: mx.array | None
) -> mx.array:
    """Attend with a chunk of one row, q [1, heads, tokens, k_dim]. The joined arrays are scratch of one layer."""
    (segments,) = kv.rows
    k, v = segments_to_arrays(segments, q.dtype)
    if mask == "causal" and sinks is None and cpu_step.fits(q, k, v):
        return cpu_step.prefill(q, k, v, scale)
    if runtime().backend == "cuda" and cuda_prefill.takes(q, k, v, mask, sinks):
        return cuda_prefill.attend(q, k, v, scale, mask)
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    if runtime().backend == "cpu" or (runtime().backend != "cuda" and has_codes(segments)):
        # Without this evaluation the pass would keep the decoded arrays of every layer until its end.
        mx.eval(out)
    return out


def segments_to_arrays(segments: Sequence[Segment], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Join consecutive segments to plain K and V, [1, kv_heads, tokens, dim]. Encoded ones are decoded to `dtype`."""
    if has_codes(segments):
        if runtime().backend == "cuda" and (joined := _join_on_cuda(segments, dtype)) is not None:
            return joined
        if runtime().backend == "metal" and (joined := _join_on_metal(segments, dtype)) is not None:
            return joined
    dense = [segment.dense(dtype) for segment in segments]
    if len(dense) == 1:
        return dense[0]
    return mx.concatenate([k for k, _ in dense], axis=2), mx.concatenate([v for _, v in dense], axis=2)


def _join_on_cuda(segments: Sequence[Segment], dtype: mx.Dtype) -> tuple[mx.array, mx.array] | None:
    """Join segments, some of them encoded, by CUDA kernels. None: decode segment by segment."""
    *before, last = segments
    own = cuda_ranges.range_of_raw(last) if isinstance(last, RawSegment) else None
    cached = segments if own is None else before
    # A raw segment may only be the last one, the sequence's own tokens: another sequence's may not be written yet.
    if any(isinstance(segment, RawSegment) for segment in cached):
        return None
    joined = cuda_join.join_input([cuda_ranges.range_of(segment) for segment in cached], own, dtype)
    if joined is None or not cuda_trials.joined_works(dtype, joined):
        return None
    return cuda_join.join(joined, dtype)


def _join_on_metal(segments: Sequence[Segment], dtype: mx.Dtype) -> tuple[mx.array, mx.array] | None:
    """Join segments, some of them encoded, by the portable kernel. None: decode segment by segment."""
    keys, values = zip(*map(token_ranges, segments), strict=True)
    k = _join_ranges(keys, dtype)
    v = None if k is None else _join_ranges(values, dtype)
    return None if k is None or v is None else (k[None], v[None])


def _join_ranges(ranges: Sequence[TokenRange], dtype: mx.Dtype) -> mx.array | None:
    """Keys or values alone, [heads, tokens, dim]"""
    if any(isinstance(held, EncodedArray) for held, _, _ in ranges):
        return codec_dispatch.join_planes(ranges, dtype)
    raw = [held[:, start:end] for held, start, end in ranges if isinstance(held, mx.array)]
    return raw[0] if len(raw) == 1 else mx.concatenate(raw, axis=1)


def token_ranges(segment: Segment) -> tuple[TokenRange, TokenRange]:
    """Return the keys and the values of a segment for the kernel that joins them."""
    if isinstance(segment, RawSegment):
        start, end = segment.start, segment.start + segment.num_tokens
        arrays = segment.k_buffer.squeeze(0), segment.v_buffer.squeeze(0)  # an index would copy
        return TokenRange(arrays[0], start, end), TokenRange(arrays[1], start, end)
    whole, start, end = segment, 0, segment.num_tokens
    if isinstance(segment, SegmentSlice):
        whole, start, end = segment.whole, segment.start, segment.end
    assert isinstance(whole, SealedSegment)
    k, v = (TokenRange(each.arrays.get("values", each), start, end) for each in (whole.k, whole.v))
    return k, v


def explain(kinds: Collection[HeadKind], *, joined: bool = False) -> list[KernelChoice]:
    """Return the path of each attention operation over heads of these kinds, and why. Runs no trial.

    `joined`: the model gets all tokens of a sequence as plain arrays, and attends to them itself.
    """
    return [choice for kind in sorted(kinds, key=repr) for choice in _explain_heads(kind, joined=joined)]


def _explain_heads(kind: HeadKind, *, joined: bool) -> list[KernelChoice]:
    if joined:
        steps = [("decode step and prefill", "stock", "the model's own attention, over joined segments")]
    else:
        steps = [*_step_paths(kind), ("prefill", *_prefill_path(kind))]
    paths = [*steps, ("segments to arrays", *_join_path(kind))]
    return [KernelChoice(f"{operation} ({kind.label})", *path) for operation, *path in paths]


def _step_paths(kind: HeadKind) -> list[tuple[str, str, str]]:
    """Return operations, back-ends and reasons. On Metal planes and raw vectors have trials of their own."""
    known = metal_trials.known_trials(kind.k.dtype, kind.k.dim, kind.v.dim)
    if runtime().backend in ("cpu", "cuda") or not known:
        return [("decode step", *_step_path(kind))]
    return [(f"decode step over {trial.what}", "metal" if trial.is_used else "stock", str(trial)) for trial in known]


def _step_path(kind: HeadKind) -> tuple[str, str]:
    backend, (dtype, k_dim, *_), v_dim = runtime().backend, kind.k, kind.v.dim
    if backend == "cpu":
        if kind.v.rotation is not None:
            return "stock", "the kernels for CPUs read no encoded values with a RoPE rotation"
        if dtype == mx.float32:
            return "cpu", "one call in numba for each layer writes the new tokens and attends for all rows"
        return "stock", "the kernels for CPUs compute in float32 only"
    if backend == "cuda":
        if known_result(cuda_trials.step_works, dtype, k_dim, v_dim):
            most = 4 * tiles_for(8, max(k_dim, v_dim))
            return "cuda", f"one launch for each layer and all rows, with up to {most} queries for each KV head"
        return "stock", "the kernel does not take such heads, was not tried yet, or failed its trial (see the log)"
    return "stock", no_kernels() if metal_trials.dialect() is None else NOT_TRIED


def _prefill_path(kind: HeadKind) -> tuple[str, str]:
    backend = runtime().backend
    if backend == "cpu" and kind.k.dtype == mx.float32:
        return "cpu", "blocks of 128 queries with a softmax in numba; MLX where a mask or sinks need it"
    if backend == "cuda":
        return "cuda", "plain products for new lengths; MLX for lengths that came often"
    return "stock", "MLX's fused attention"


def _join_path(kind: HeadKind) -> tuple[str, str]:
    if runtime().backend == "cuda":
        if known_result(cuda_trials.join_works, kind.k.dtype, kind.k.dim, kind.v.dim, kind.k.rotation):
            return "cuda", "one launch for keys and one for values"
        return "stock", "the kernel does not take such vectors, was not tried yet, or failed its trial (see the log)"
    return codec_dispatch.join_path(kind.k)
