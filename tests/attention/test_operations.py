"""Conformance of attention operations: each implementation, called by dispatch, against float64 numpy.

The cases are those of the trials and more. Where no GPU is, CUDA's kernels are emulated and Metal's run as plain C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import cycle
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.attention import dispatch
from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda import prefill as cuda_prefill
from kvstrata.attention.cuda import trials as cuda_trials
from kvstrata.attention.cuda.step import LaunchState
from kvstrata.attention.metal import launch_plan as metal_launch_plan
from kvstrata.attention.metal import trials as metal_trials
from kvstrata.attention.metal.trials import KV_HEADS, DecodeKind, case_segments
from kvstrata.attention.segments import KvSlot, RawSegment, SealedSegment, Segment, SegmentedKV, SegmentSlice
from kvstrata.codecs import trials as codec_trials
from kvstrata.codecs.backends import Backend, runtime
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda.planes import RAW_BITS
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.kv.buffers import KvBuffer, KvShape
from tests.attention import cuda_emulated
from tests.attention.plain_kernels import COMPILER, Plain
from tests.attention.test_metal_decode import ONE_SHAPE
from tests.codecs import reference
from tests.codecs.arrays import some_rotation

ON_GPU = mx.cuda.is_available()
SCALE = 0.1
FREE_TOKENS = 3

KINDS = [DecodeKind(mx.float32, 64, 64, 2), DecodeKind(mx.bfloat16, 128, 128, 4)]
MORE_KINDS = [
    *KINDS,
    DecodeKind(mx.float16, 64, 64, 8),
    DecodeKind(mx.float32, 96, 64, 1),
    DecodeKind(mx.float32, 192, 128, 3),
]


class Row:
    """A sequence over given segments, with a buffer of its own that the next token goes to."""

    def __init__(self, before: Before, kind: DecodeKind, num_own: int, seed: int) -> None:
        self._kind, self._before = kind, before
        self._buffer = KvBuffer(num_own + FREE_TOKENS, KvShape(KV_HEADS, kind.k_dim, kind.v_dim, kind.dtype))
        self._buffer.put(0, *tokens(kind, num_own, seed))
        self._num_own = num_own

    def segments_before(self) -> tuple[Segment, ...]:
        return self._before.segments

    def next_slot(self) -> KvSlot:
        return self._buffer.slot(self._num_own, self._num_own + 1)

    def count_next(self) -> None:
        self._num_own += 1

    def put_last(self, k: mx.array, v: mx.array) -> None:
        self._buffer.put(self._num_own - 1, k, v)

    def append(self, k: mx.array, v: mx.array) -> None:
        self.count_next()
        self.put_last(k, v)

    def segments(self) -> tuple[Segment, ...]:
        return (*self._before.segments, self._buffer.segment(self._num_own))

    def float64(self) -> tuple[np.ndarray, np.ndarray]:
        """Return K and V of all tokens, [kv_heads, tokens, dim]."""
        k, v = float64(self._kind, [self._buffer.segment(self._num_own)])
        return np.concatenate([self._before.k, k], axis=1), np.concatenate([self._before.v, v], axis=1)


def tokens(kind: DecodeKind, num_tokens: int, seed: int, rows: int = 1) -> tuple[mx.array, mx.array]:
    """Make K and V, off centre, so that means matter."""
    shapes = [(rows, KV_HEADS, num_tokens, dim) for dim in (kind.k_dim, kind.v_dim)]
    k, v = ((mx.random.normal(s, key=mx.random.key(seed + i)) + 0.5).astype(kind.dtype) for i, s in enumerate(shapes))
    mx.eval(k, v)
    return k, v


def queries(kind: DecodeKind, num_rows: int, num_tokens: int = 1) -> mx.array:
    shape = (num_rows, KV_HEADS * kind.group, num_tokens, kind.k_dim)
    return mx.random.normal(shape, key=mx.random.key(5)).astype(kind.dtype)


def sealed(kind: DecodeKind, k_bits: int, v_bits: int, num_tokens: int, seed: int, position: int = 0) -> SealedSegment:
    """Encode with stock operations, keys with RoPE-aware means."""
    k, v = (x.squeeze(0) for x in tokens(kind, num_tokens, seed))
    rotation = some_rotation("halves", kind.k_dim)
    with runtime().use_backend("plain"):
        return SealedSegment(
            RawCodec().encode(k, position) if k_bits == RAW_BITS else PlanesCodec(k_bits, rotation).encode(k, position),
            RawCodec().encode(v, position) if v_bits == RAW_BITS else PlanesCodec(v_bits).encode(v, position),
        )


class Before(NamedTuple):
    """Segments before the own buffer of a row, and their K and V in float64, [kv_heads, tokens, dim]."""

    segments: tuple[Segment, ...]
    k: np.ndarray
    v: np.ndarray


@cache
def rows_of(kind: DecodeKind) -> tuple[Before, ...]:
    """Return the segments of each row: the cases of the trials, then slices and offsets in a group."""
    return tuple(Before(segments, *float64(kind, segments)) for segments in _segments_of(kind))


def _segments_of(kind: DecodeKind) -> Iterator[tuple[Segment, ...]]:
    with runtime().use_backend("plain"):
        for case in ((0, 0, 2), (0, 0, 3), *metal_trials.PLANES_CASES):
            yield case_segments(kind, *case)
    for seed, bits in enumerate(cuda_trials.CODED_BITS):
        yield (sealed(kind, *bits, 300, 10 * seed),)
    yield tuple(sealed(kind, *bits, 40, 10 * seed, 40 * seed) for seed, bits in enumerate(cuda_trials.CODED_BITS))
    whole = sealed(kind, 8, 4, 300, 70, 230)
    yield (SegmentSlice(whole, 3, 170), SegmentSlice(whole, 170, 171), RawSegment(*tokens(kind, 20, 80), 9, 4))
    yield ()


def float64(kind: DecodeKind, segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """Decode segments to K and V, [kv_heads, tokens, dim]."""
    k, v = ([np.zeros((KV_HEADS, 0, dim))] for dim in (kind.k_dim, kind.v_dim))
    for segment in segments:
        if isinstance(segment, RawSegment):
            at = slice(segment.start, segment.start + segment.num_tokens)
            pair = [reference.float64(x)[0, :, at] for x in (segment.k_buffer, segment.v_buffer)]
        else:
            start, end = (segment.start, segment.end) if isinstance(segment, SegmentSlice) else (0, segment.num_tokens)
            whole = segment.whole if isinstance(segment, SegmentSlice) else segment
            assert isinstance(whole, SealedSegment)
            pair = [_decoded(encoded)[:, start:end] for encoded in (whole.k, whole.v)]
        k.append(pair[0])
        v.append(pair[1])
    return np.concatenate(k, axis=1), np.concatenate(v, axis=1)


def _decoded(encoded: EncodedArray) -> np.ndarray:
    if isinstance(encoded.codec, RawCodec):
        return reference.float64(encoded.arrays["values"])
    return reference.decode(encoded)


def attention(q: mx.array, k: np.ndarray, v: np.ndarray, sinks: mx.array | None = None) -> np.ndarray:
    """Attend with q [heads, tokens, k_dim], the last tokens of k [kv_heads, total, k_dim] -> [heads, tokens, v_dim]"""
    k, v = (np.repeat(x, q.shape[0] // x.shape[0], axis=0) for x in (k, v))
    scores = reference.float64(q) @ k.swapaxes(1, 2) * SCALE
    past = k.shape[1] - q.shape[1]
    scores = np.where(np.arange(k.shape[1]) <= past + np.arange(q.shape[1])[:, None], scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(reference.float64(sinks)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], axis=2)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return weights[:, :, : k.shape[1]] @ v


class Implementation:
    """Stock operations; the base of native ones."""

    backend: Backend = "plain"
    kinds: Sequence[DecodeKind] = MORE_KINDS
    few_kinds: Sequence[DecodeKind] = KINDS[:1]  # where a kind takes seconds
    # Largest differences, as shares of the largest value. Results have the dtype of the queries.
    within = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}  # noqa: RUF012

    def __init__(self, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        self.num_runs = 0
        if self.backend == "plain" and ON_GPU:
            pytest.skip("MLX has no quantized products of these shapes on CUDA, where nothing calls them")
        self._prepare(patch, stack)
        stack.enter_context(runtime().use_backend(self.backend))

    def _prepare(self, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:  # noqa: ARG002
        self._count(patch, dispatch.stock, "attend_rows")
        self._count(patch, mx.fast, "scaled_dot_product_attention")
        self._count(patch, SealedSegment, "dense")

    def _count(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Count the calls of a function of the implementation."""
        function = getattr(owner, name)

        def counted(*args: Any, **others: Any) -> Any:
            self.num_runs += 1
            return function(*args, **others)

        patch.setattr(owner, name, counted)


class Cpu(Implementation):
    backend = "cpu"
    kinds = [kind for kind in MORE_KINDS if kind.dtype == mx.float32]  # noqa: RUF012

    def _prepare(self, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:  # noqa: ARG002
        if not cpu_step.available():
            pytest.skip("needs a CPU with numba")
        self._count(patch, cpu_step.CpuStep, "attend")
        self._count(patch, cpu_step, "softmax")
        self._count(patch, cpu_step, "prefill")


class Cuda(Implementation):
    """CUDA's kernels, on a GPU or emulated. Queries and weights have 14 bits where they meet codes."""

    backend = "cuda"
    kinds = MORE_KINDS if ON_GPU else KINDS
    few_kinds = MORE_KINDS if ON_GPU else KINDS[:1]
    within = {mx.float32: 3e-4, mx.float16: 2e-3, mx.bfloat16: 2e-2}  # noqa: RUF012

    def _prepare(self, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:  # noqa: ARG002
        if not ON_GPU:
            if not cuda_emulated.works():
                pytest.skip("needs a GPU with CUDA, or Linux and a C++ compiler")
            cuda_emulated.install(patch)
        patch.setattr(cuda_trials, "step_works", lambda *_: True)
        patch.setattr(cuda_trials, "join_works", lambda *_: True)
        self._count(patch, cuda_kernels.Kernel, "run")
        self._count(patch, cuda_prefill, "attend")


class Portable(Implementation):
    """The kernels of Metal as plain C++."""

    backend = "metal"
    kinds = KINDS
    within = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 2e-2}  # noqa: RUF012

    def _prepare(self, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        if ON_GPU:
            # The addresses that CUDA's kernels know of the shared cases would no longer hold.
            pytest.skip("reads arrays on the host, and MLX then moves them off the GPU")
        if COMPILER is None:
            pytest.skip("needs a C++ compiler")
        patch.setattr(metal_launch_plan, "SHAPES", ONE_SHAPE)
        metal_launch_plan.plan.cache_clear()
        stack.callback(metal_launch_plan.plan.cache_clear)
        self._count(patch, Plain, "__call__")
        run = Plain()
        stack.enter_context(metal_trials.as_if_tried("plain", run))
        stack.enter_context(codec_trials.as_if_tried("plain", run))


@pytest.fixture
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Implementation]:
    with ExitStack() as stack:
        made = request.param(monkeypatch, stack)
        yield made
        assert made.num_runs, "no case reached the implementation"


def for_each(*kinds: Callable[..., Implementation]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("implementation", kinds, ids=lambda kind: kind.__name__, indirect=True)


def check(found: mx.array, wanted: np.ndarray, implementation: Implementation, case: object) -> None:
    error = np.abs(reference.float64(found) - wanted).max() / np.abs(wanted).max()
    assert error <= implementation.within[found.dtype], case


@for_each(Implementation, Cpu, Cuda, Portable)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_decode_step_writes_new_tokens_and_attends_to_them(implementation: Implementation, has_sinks: bool) -> None:
    for kind in implementation.kinds[:1] if has_sinks else implementation.kinds:
        lengths = cycle((1, 9, 70))
        rows = [Row(before, kind, next(lengths), 100 + 10 * i) for i, before in enumerate(rows_of(kind))]
        heads = KV_HEADS * kind.group
        sinks = mx.random.normal((heads,), key=mx.random.key(6)).astype(kind.dtype) if has_sinks else None
        for step in range(2):
            (k, v), q = tokens(kind, 1, 300 + 10 * step, len(rows)), queries(kind, len(rows))
            wanted = [
                [np.concatenate(pair, axis=1) for pair in zip(row.float64(), new, strict=True)]
                for row, *new in zip(rows, reference.float64(k), reference.float64(v), strict=True)
            ]
            held = dispatch.begin_step(rows, k, v, LaunchState())
            if held is None:
                for i, row in enumerate(rows):
                    row.append(k[i : i + 1], v[i : i + 1])
                held = SegmentedKV(tuple(row.segments() for row in rows))
            out = dispatch.attend(q, held, held, None, SCALE, None, sinks)
            mx.eval(out, [] if isinstance(held, SegmentedKV) else held.launched)
            for i, (row, (keys, values)) in enumerate(zip(rows, wanted, strict=True)):
                check(out[i], attention(q[i], keys, values, sinks), implementation, (kind, step, i))
                for found, new in zip(row.float64(), (keys, values), strict=True):
                    np.testing.assert_array_equal(found[:, -1], new[:, -1], "the new token was not written")


@for_each(Implementation, Cpu, Cuda, Portable)
def test_decode_of_one_row_attends_to_all_its_segments(implementation: Implementation) -> None:
    for kind in implementation.few_kinds:
        for i, before in enumerate(rows_of(kind)):
            row = Row(before, kind, 7, 100 + 10 * i)
            q = queries(kind, 1)
            out = dispatch.decode(q, SegmentedKV((row.segments(),)), SCALE, None)
            check(out[0], attention(q[0], *row.float64()), implementation, (kind, i))


@for_each(Implementation, Cpu, Cuda)
@pytest.mark.parametrize("num_tokens", [2, 130])
def test_prefill_attends_to_earlier_tokens_and_causally_to_its_own(
    implementation: Implementation, num_tokens: int
) -> None:
    for kind in implementation.kinds if num_tokens == 2 else implementation.few_kinds:
        for i, before in enumerate(rows_of(kind)):
            row = Row(before, kind, num_tokens, 100 + 10 * i)
            q = queries(kind, 1, num_tokens)
            out = dispatch.prefill(q, SegmentedKV((row.segments(),)), SCALE, "causal", None)
            check(out[0], attention(q[0], *row.float64()), implementation, (kind, i))


@for_each(Implementation, Cuda, Portable)
def test_segments_to_arrays_joins_all_tokens_in_order(implementation: Implementation) -> None:
    for kind in implementation.kinds:
        for i, before in enumerate(rows_of(kind)):
            row = Row(before, kind, 5, 100 + 10 * i)
            arrays = dispatch.segments_to_arrays(row.segments(), kind.dtype)
            for found, wanted in zip(arrays, row.float64(), strict=True):
                assert found.dtype == kind.dtype
                check(found[0], wanted, implementation, (kind, i))
