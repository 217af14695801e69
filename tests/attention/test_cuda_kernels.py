"""CUDA kernels compared with float64 arithmetic on the arrays that stock operations decode.

Without a GPU they run on the processor, where there is a C++ compiler, and only some of the cases: each takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.attention.cuda import join as cuda_join
from kvstrata.attention.cuda import ranges as cuda_ranges
from kvstrata.attention.cuda import step as cuda_step
from kvstrata.attention.cuda import trials as cuda_trials
from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.attention.segments import KernelViews, RawSegment, SealedSegment, SegmentSlice
from kvstrata.codecs import backends
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda import planes as cuda_planes
from kvstrata.codecs.cuda.kernels import Kernel
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from tests.attention import cuda_emulated
from tests.codecs.arrays import ROTATIONS, keys, some_rotation
from tests.gpu.step_right import Case, decoded, right

ON_GPU = backends.runtime().backend == "cuda"


def some(cases: Sequence[Any], first: int, step: int) -> Sequence[Any]:
    return cases if ON_GPU else cases[first::step]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        if not cuda_emulated.works():
            pytest.skip("needs a GPU and mlx[cuda13] or mlx[cuda12], or Linux and a C++ compiler")
        cuda_emulated.install(monkeypatch)


needs_kernels = pytest.mark.usefixtures("kernels")

SIZES = st.lists(st.integers(1, 256), min_size=1, max_size=12)


@given(k_sizes=SIZES, v_cuts=st.sets(st.integers(1, 3000)), ends=st.tuples(st.integers(0, 3000), st.integers(0, 3000)))
def test_pieces_cover_a_range_once_and_cross_no_mean_run(
    k_sizes: list[int], v_cuts: set[int], ends: tuple[int, int]
) -> None:
    num_tokens = sum(k_sizes)
    v_bounds = sorted({0, num_tokens} | {cut for cut in v_cuts if cut < num_tokens})
    v_sizes = [b - a for a, b in pairwise(v_bounds)]
    start, end = sorted(number % (num_tokens + 1) for number in ends)
    if start == end:
        start, end = 0, num_tokens
    pieces = np.asarray(cuda_planes.pieces_of((tuple(k_sizes), tuple(v_sizes)), 100, start, end, 64))
    covered = np.concatenate([np.arange(first, first + count) for first, count, _, _, _ in pieces])
    assert (pieces[:, 4] == (100 + pieces[:, 0]) % 256).all()
    assert covered.tolist() == list(range(start, end))
    assert pieces[:, 1].max() <= 64
    for column, sizes in ((2, k_sizes), (3, v_sizes)):
        ids = np.repeat(np.arange(len(sizes)), sizes)
        assert all(set(ids[first : first + count]) == {row[column]} for row in pieces for first, count in [row[:2]])


# Each case is a kernel of its own to compile: a second or two when first run.
CASES = [
    (8, 8, 64, 1),
    (2, 2, 64, 8),
    (8, 8, 128, 2),
    (4, 4, 128, 4),
    (8, 4, 128, 7),
    (4, 8, 128, 16),
    (8, 8, 192, 5),
    (4, 2, 192, 1),
    (8, 8, 256, 3),
    (2, 4, 256, 9),
]


@needs_kernels
def test_decode_of_a_range_equals_its_tokens() -> None:
    planes = _encoded(4, 64, rotation="neighbours")
    assert _error(cuda_planes.decode_planes(planes, mx.float32, 33, 290), decoded(planes)[:, 33:290]) < 1e-6


JOINED = [(64, mx.float16, True), (128, mx.bfloat16, True), (128, mx.bfloat16, False), (256, mx.float16, True)]


@needs_kernels
@pytest.mark.parametrize(("dim", "dtype", "has_rotation"), some(JOINED, 1, 4))
@pytest.mark.parametrize("with_own", [True, False])
def test_join_equals_decoded_segments(
    dim: int, dtype: mx.Dtype, has_rotation: bool, with_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.attention.dispatch.runtime", lambda: SimpleNamespace(backend="cuda"))
    monkeypatch.setattr("kvstrata.attention.cuda.trials.joined_works", lambda *_: True)
    # Of any bits, some of them cut, one raw and some by half; each lies elsewhere in its groups.
    sealed = [
        SealedSegment(
            _encoded(k_bits, dim, seed=i, rotation=_kind(dim) if has_rotation else ""),
            _encoded(v_bits, dim, seed=5 + i),
        )
        for i, (k_bits, v_bits) in enumerate([(8, 8), (4, 2), (2, 4)])
    ]
    raw = [RawCodec().adopt(keys(2, 33, dim, seed=20 + i, dtype=dtype), 0) for i in range(2)]
    half = [RawCodec().adopt(keys(2, 601, dim, seed=40 + i, dtype=dtype), 200) for i in range(2)]
    sealed += [SealedSegment(half[0], sealed[0].v), SealedSegment(sealed[1].k, half[1])]
    own = [keys(2, 50, dim, seed=30 + i, dtype=dtype)[None] for i in range(2)]
    parts: list[Any] = [
        SegmentSlice(sealed[0], 100, 290),
        SealedSegment(*raw),
        *sealed[1:],
        SegmentSlice(SealedSegment(*raw), 3, 4),
    ]
    wanted = [
        [decoded(sealed[0].k)[:, 100:290], decoded(sealed[0].v)[:, 100:290]],
        [_numbers(planes.arrays["values"]) for planes in raw],
        *([decoded(part.k), decoded(part.v)] for part in sealed[1:]),
        [_numbers(planes.arrays["values"])[:, 3:4] for planes in raw],
    ]
    if with_own:
        parts.append(RawSegment(own[0], own[1], 21, 2))
        wanted.append([_numbers(array[0])[:, 2:23] for array in own])
    launched: list[str] = []
    run: Any = Kernel.run

    def watched(kernel: Kernel, *given: Any, **launch: Any) -> list[mx.array]:
        launched.append(kernel.name)
        return run(kernel, *given, **launch)

    monkeypatch.setattr(Kernel, "run", watched)
    joined = segments_to_arrays(tuple(parts), dtype)
    for found, expected in zip(joined, zip(*wanted, strict=True), strict=True):
        assert _error(found[0], np.concatenate(expected, axis=1)) < {mx.float16: 1e-3, mx.bfloat16: 5e-3}[dtype]
    assert launched.count("decode_ranges") == 2
    assert not any(name == "decode_planes" for name in launched)


def _numbers(array: mx.array) -> np.ndarray:
    return np.asarray(array.astype(mx.float32))


@needs_kernels
def test_trial_accepts_the_join_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.attention.cuda.trials.runtime", lambda: SimpleNamespace(backend="cuda"))
    monkeypatch.setattr(backends.runtime(), "checks", {})
    assert cuda_trials.join_works(mx.bfloat16, 128, 128, None)
    tables = cuda_join._tables

    def one_off(spans: tuple[cuda_join.JoinedRange, ...]) -> cuda_join.JoinTables:
        return tables(tuple([s._replace(start=s.start - 1, end=s.end - 1) if s.start else s for s in spans]))

    monkeypatch.setattr(cuda_join, "_tables", one_off)
    backends.runtime().checks.clear()
    assert not cuda_trials.join_works(mx.bfloat16, 128, 128, None)


def test_join_leaves_buffers_of_other_sequences_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.attention.dispatch.runtime", lambda: SimpleNamespace(backend="cuda"))
    monkeypatch.setattr("kvstrata.attention.cuda.trials.joined_works", lambda *_: True)
    monkeypatch.setattr("kvstrata.attention.cuda.join.join", lambda *_: pytest.fail("not this way"))
    planes = _encoded(8, 64, rotation="")
    x = keys(2, 8, 64, dtype=mx.bfloat16)[None]
    live = RawSegment(x, x, 8)
    monkeypatch.setattr(SealedSegment, "dense", lambda *_: (x, x))
    for row in (
        (live, live),
        (SealedSegment(planes, planes), live, live),
        (live, SealedSegment(planes, planes)),
        (live,),
    ):
        segments_to_arrays(row, mx.bfloat16)


@needs_kernels
@pytest.mark.parametrize(
    ("k_bits", "v_bits", "dim", "queries", "has_rotation"),
    some([(*case, has_rotation) for case in CASES for has_rotation in (True, False)], 1, 7),
)
def test_attention_over_planes_equals_attention_over_decoded_arrays(
    k_bits: int, v_bits: int, dim: int, queries: int, has_rotation: bool
) -> None:
    k, v = _encoded(k_bits, dim, rotation=_kind(queries) if has_rotation else ""), _encoded(v_bits, dim, seed=3)
    q = _queries(2, queries, dim)
    out, log_sum = cuda_ranges.attend_planes(q, k, v, 17, 540, 0.25)
    wanted, wanted_log_sum = _attention(q, decoded(k)[:, 17:540], decoded(v)[:, 17:540], 0.25)
    assert _error(out, wanted) < 2e-5
    # Queries have 14 bits where they meet codes.
    assert np.abs(np.asarray(log_sum) - wanted_log_sum).max() < 5e-4


@needs_kernels
@pytest.mark.parametrize("dtype", some([mx.float16, mx.bfloat16], 1, 1))
def test_attention_over_segments_of_all_kinds_equals_decoded_arrays(dtype: mx.Dtype) -> None:
    dim, scale = 128, 0.05
    first, buffer = keys(1, 2, 4, dim, seed=5, dtype=dtype), keys(1, 2, 400, dim, seed=6, dtype=dtype)
    k, v = _encoded(8, dim), _encoded(4, dim, seed=3)
    tail = cuda_ranges.RawRange(buffer, buffer, 7, 340)
    ranges = [cuda_ranges.RawRange(first, first, 0, 4), cuda_ranges.EncodedRange(k, v, 0, k.num_tokens), tail]
    q = _queries(1, 6, 1, dim).astype(dtype)
    sinks = mx.array([0.0, 5, 10, 15, 20, 25])
    parts = [_float64(first)[0], decoded(k), _float64(buffer)[0, :, 7:340]]
    values = [_float64(first)[0], decoded(v), _float64(buffer)[0, :, 7:340]]
    for given_sinks in (None, sinks):
        out = cuda_ranges.attend(q, ranges, scale, given_sinks)
        assert out.shape == (1, 6, 1, dim)
        sink_scores = None if given_sinks is None else np.asarray(given_sinks).reshape(2, 3, 1)
        wanted, _ = _attention(
            q.reshape(2, 3, dim), np.concatenate(parts, axis=1), np.concatenate(values, axis=1), scale, sink_scores
        )
        assert _error(out.reshape(2, 3, dim), wanted) < 5e-3


@needs_kernels
@pytest.mark.parametrize("with_planes", [False, True])
def test_step_writes_its_tokens_and_attends_to_them(with_planes: bool) -> None:
    check_step(mx.bfloat16, 64, with_planes)


@needs_kernels
@pytest.mark.parametrize("rotation", some(ROTATIONS, 2, 1))
def test_step_is_right_over_rope_aware_means(rotation: str) -> None:
    check_step(mx.bfloat16, 128, with_planes=True, rotation=rotation)


@needs_kernels
@pytest.mark.parametrize(
    "case",
    [
        Case(mx.float16, 64, 64, 1, 8, 3, 3, 6, has_sinks=True),
        Case(mx.bfloat16, 192, 128, 1, 2, 2, 2, 11),
        Case(mx.float16, 256, 256, 1, 3, 2, 2, 10),
    ],
    ids=lambda case: case.name,
)
def test_step_is_right_for_unusual_head_dims(case: Case) -> None:
    assert right(case).startswith("ok")


@pytest.mark.skipif(ON_GPU or not cuda_emulated.works(), reason="needs Linux and a C++ compiler, and no GPU")
def test_step_is_right_with_more_blocks_than_weights_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million tokens, or here two."""

    real_run = Kernel.run

    def run(kernel: Kernel, *args: Any, **kwargs: Any) -> list[mx.array]:
        header = kernel.header.replace("(WARPS - 1) * ROOM", "2")
        assert kernel.name != "step3" or header != kernel.header
        return real_run(replace(kernel, header=header), *args, **kwargs)

    cuda_emulated.install(monkeypatch)
    monkeypatch.setattr(Kernel, "run", run)
    assert right(Case(mx.bfloat16, 64, 64, 1, 2, 2, 4, 3)).startswith("ok")


def check_step(dtype: mx.Dtype, dim: int, with_planes: bool, rotation: str = "") -> None:
    """Three rows with buffers of their own; some also read a buffer that another row writes, and planes."""
    scale, sinks = 0.1, mx.array([0.0, 5, 10, 15, 20, 25])
    buffers = [_pair(1, 2, size, dim, seed=size, dtype=dtype) for size in (256, 300, 512)]
    planes = cuda_ranges.EncodedRange(_encoded(8, dim, rotation=rotation), _encoded(4, dim, seed=3), 5, 590)
    first = _pair(1, 2, 4, dim, seed=5, dtype=dtype)
    before: list[list[cuda_ranges.Range]] = [
        [],
        [cuda_ranges.RawRange(*first, 0, 4)],
        [cuda_ranges.RawRange(*buffers[0], 7, 90)],
    ]
    if with_planes:
        before[1].append(planes)
        raw = RawCodec().adopt(keys(2, 601, dim, seed=9, dtype=dtype), 200)
        stepping, kept = (
            cuda_ranges.EncodedRange(raw, planes.v, 33, 590),
            cuda_ranges.EncodedRange(planes.k, raw, 0, 280),
        )
        before[2][:0] = [replace(planes, start=100, end=300), stepping, planes, kept]
    held = {id(array): _float64(array) for pair in (*buffers, first) for array in pair}
    counters, known, wheres = mx.zeros((6,), mx.uint32), cuda_step.LaunchState(), [KernelViews() for _ in buffers]
    # The last row is a ring: its new token lies among older ones.
    for at, counts in [((100, 7, 130), (101, 8, 512)), ((101, 8, 131), (102, 9, 512))]:
        places = zip(buffers, at, counts, wheres, strict=True)
        slots = [cuda_step.KvSlot(*pair, pair[0].shape[2], a, b, where) for pair, a, b, where in places]
        reads = known.reads(before, slots)
        assert reads is not None
        new = _pair(3, 2, 1, dim, seed=at[0], dtype=dtype)
        q = _queries(3, 6, 1, dim).astype(dtype)
        out = cuda_step.attend_step(q, *new, cuda_step.launch_of(reads, slots, counters), scale, sinks)
        mx.eval(out)
        for row, slot in enumerate(slots):
            for buffer, tokens in zip(buffers[row], new, strict=True):
                held[id(buffer)][0, :, slot.at] = _float64(tokens)[row, :, 0]
            ranges = [*before[row], cuda_ranges.RawRange(*buffers[row], 0, slot.num_tokens)]
            k, v = (np.concatenate([_tokens(part, which, held) for part in ranges], axis=1) for which in "kv")
            wanted, _ = _attention(q[row].reshape(2, 3, dim), k, v, scale, np.asarray(sinks).reshape(2, 3, 1))
            assert _error(out[row].reshape(2, 3, dim), wanted) < 5e-3
    assert all(np.array_equal(_float64(array), held[id(array)]) for pair in buffers for array in pair)
    assert not counters.any()


def _pair(*shape: int, seed: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    return keys(*shape, seed=seed, dtype=dtype), keys(*shape, seed=seed + 50, dtype=dtype)


def _tokens(part: cuda_ranges.Range, which: str, held: dict[int, np.ndarray]) -> np.ndarray:
    source = getattr(part, which)
    dense = decoded(source) if isinstance(source, EncodedArray) else held[id(source)][0]
    return dense[:, part.start : part.end]


@pytest.mark.skipif(ON_GPU or not cuda_emulated.works(), reason="needs Linux and a C++ compiler, and no GPU")
def test_trial_rejects_a_wrong_kernel() -> None:
    planes, right_one = _encoded(4, 64), cuda_kernels.decode_planes()
    wrong_one = replace(right_one, header=right_one.header.replace("NEXT = 0x30303030", "NEXT = 0x10101010"))
    with pytest.MonkeyPatch.context() as patch:
        cuda_emulated.install(patch)
        for kernel, is_right in ((right_one, True), (wrong_one, False)):
            patch.setattr(cuda_kernels, "decode_planes", lambda of=kernel: of)
            assert (_error(cuda_planes.decode_planes(planes, mx.float32), decoded(planes)) < 1e-6) == is_right


@needs_kernels
def test_attention_over_extreme_vectors_equals_decoded_arrays() -> None:
    x = mx.concatenate([mx.zeros((1, 70, 64)), mx.full((1, 30, 64), 3.0), keys(1, 3, 64) * 1e6], axis=1)
    planes = PlanesCodec(8).encode(x, position=250)
    assert _error(cuda_planes.decode_planes(planes, mx.float32), decoded(planes)) < 1e-6
    q = _queries(1, 2, 64) * 1e-5
    wanted, _ = _attention(q, decoded(planes), decoded(planes), 1.0)
    out = cuda_ranges.attend_planes(q, planes, planes, 0, planes.num_tokens).out
    assert _error(out, wanted) < 1e-4


def _kind(number: int) -> str:
    """All kinds of rotation over many cases, where each case is seconds of compiling."""
    return ROTATIONS[number % len(ROTATIONS)]


def _encoded(bits: int, dim: int, seed: int = 0, rotation: str = "") -> EncodedArray:
    """Several segments, the first and the last of them short."""
    codec = PlanesCodec(bits, some_rotation(rotation, dim) if rotation else None)
    return codec.encode(keys(2, 601, dim, seed=seed), position=200)


def _queries(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(1)) * 0.3


def _float64(x: mx.array) -> np.ndarray:
    return np.asarray(x.astype(mx.float32)).astype(np.float64)


def _attention(
    q: mx.array, k: np.ndarray, v: np.ndarray, scale: float, sinks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    scores = _float64(q) * scale @ k.swapaxes(1, 2)
    every = scores if sinks is None else np.concatenate([scores, sinks], axis=2)
    largest = every.max(axis=2, keepdims=True)
    total = np.exp(every - largest).sum(axis=2, keepdims=True)
    return np.exp(scores - largest) @ v / total, (largest + np.log(total))[:, :, 0]


def _error(found: mx.array, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(_float64(found) - wanted) / np.linalg.norm(wanted))
