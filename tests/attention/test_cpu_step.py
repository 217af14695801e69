"""CPU step: kernels over runs of raw and encoded tokens in one call, compared with attention over decoded segments."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.segments import KvSlot, RawSegment, SealedSegment, Segment, SegmentSlice
from kvstrata.attention.stock import attend_segments
from kvstrata.codecs.base import Codec, EncodedArray
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.registry import parse_for
from kvstrata.kv.buffers import KvBuffer
from tests.attention.test_attend import distance
from tests.codecs.arrays import named

pytest.importorskip("numba")
if not cpu_step.available():
    pytest.skip("the kernels are for a CPU", allow_module_level=True)

HEAD_DIMS = [64, 80, 96, 128, 192, 256]
CODECS = ["raw", "planes:8", "planes:4", "planes:2"]
KEY_CODECS = [*CODECS, "planes:8 halves", "planes:4 neighbours", "planes:2 last"]


class PartsRow:
    """A row over given segments, and a buffer that the new token goes to."""

    def __init__(self, before: Sequence[Segment], tail: tuple[mx.array, mx.array], room: int = 3) -> None:
        self._before = before
        self._buffer = KvBuffer(tail[0].shape[2] + room)
        self._buffer.put(0, *tail)
        self._used = tail[0].shape[2]

    def segments_before(self) -> tuple[Segment, ...]:
        return tuple(self._before)

    def next_slot(self) -> KvSlot:
        return self._buffer.slot(self._used, self._used + 1)

    def count_next(self) -> None:
        self._used += 1

    def put_last(self, k: mx.array, v: mx.array) -> None:
        self._buffer.put(self._used - 1, k, v)

    def segments(self) -> tuple[Segment, ...]:
        assert self._buffer.k is not None
        assert self._buffer.v is not None
        return (*self._before, RawSegment(self._buffer.k, self._buffer.v, self._used))


def normal(rng: np.random.Generator, *shape: int) -> mx.array:
    """Off centre, so that means matter."""
    return mx.array(rng.standard_normal(shape, np.float32) + np.float32(0.5))


def sealed(k: mx.array, v: mx.array, k_codec: Codec, v_codec: Codec, position: int = 0) -> SealedSegment:
    return SealedSegment(k_codec.encode(k[0], position), v_codec.encode(v[0], position))


def a_part(
    rng: np.random.Generator, names: tuple[str, str], shape: tuple[int, ...], position: int = 0
) -> SealedSegment:
    heads, tokens, k_dim, v_dim = shape
    k, v = normal(rng, 1, heads, tokens, k_dim), normal(rng, 1, heads, tokens, v_dim)
    return sealed(k, v, named(names[0], k_dim), named(names[1], v_dim), position)


def a_row(rng: np.random.Generator, before: Sequence[Segment], shape: tuple[int, ...]) -> PartsRow:
    heads, tokens, k_dim, v_dim = shape
    return PartsRow(before, (normal(rng, 1, heads, tokens, k_dim), normal(rng, 1, heads, tokens, v_dim)))


def step(
    rng: np.random.Generator, rows: Sequence[PartsRow], shape: tuple[int, ...], queries: int
) -> tuple[cpu_step.CpuStep, mx.array]:
    """-> a step over the rows, and queries for it"""
    heads, _, k_dim, v_dim = shape
    keys, values = normal(rng, len(rows), heads, 1, k_dim), normal(rng, len(rows), heads, 1, v_dim)
    return begin(rows, keys, values), normal(rng, len(rows), heads * queries, 1, k_dim)


def begin(rows: Sequence[PartsRow], keys: mx.array, values: mx.array) -> cpu_step.CpuStep:
    step = cpu_step.begin_step(rows, keys, values)
    assert step is not None
    return step


def check(
    rng: np.random.Generator,
    rows: Sequence[PartsRow],
    shape: tuple[int, ...],
    queries: int = 3,
    sinks: mx.array | None = None,
) -> np.ndarray:
    """One step over the rows is attention over their parts; -> what the step gave"""
    taken, q = step(rng, rows, shape, queries)
    scale = shape[2] ** -0.5
    out = taken.attend(q, scale, sinks)
    for i, row in enumerate(rows):
        wanted = attend_segments(q[i : i + 1], row.segments(), scale, sinks)
        dense = attend_segments(q[i : i + 1], _dense(row.segments()), scale, sinks)
        assert distance(out[i : i + 1], wanted) < 1e-4
        assert distance(out[i : i + 1], dense) < 1e-4
    return np.array(out)


def _dense(parts: Sequence[Segment]) -> tuple[RawSegment, ...]:
    """Decoded by MLX's operations, so that no kernel is its own witness."""
    made = []
    for part in parts:
        if isinstance(part, RawSegment):
            made.append(part)
            continue
        whole = part.whole if isinstance(part, SegmentSlice) else part
        assert isinstance(whole, SealedSegment)
        start = part.start if isinstance(part, SegmentSlice) else 0
        k, v = (_values(planes)[None, :, start : start + part.num_tokens] for planes in (whole.k, whole.v))
        made.append(RawSegment(k, v, part.num_tokens))
    return tuple(made)


def _values(planes: EncodedArray) -> mx.array:
    if isinstance(planes.codec, PlanesCodec):
        return planes.codec.decode_stock(planes)
    return planes.codec.decode(planes, mx.float32)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("names", list(product(KEY_CODECS, CODECS)))
def test_cpu_step_is_right_for_every_pair_of_codecs_and_head_dim(names: tuple[str, str], dim: int) -> None:
    rng = np.random.default_rng(dim)
    part = a_part(rng, names, (2, 300, dim, dim), position=100)
    check(rng, [a_row(rng, [part], (2, 37, dim, dim))], (2, 37, dim, dim))


@pytest.mark.parametrize("dims", [(192, 128), (64, 80), (128, 64), (16, 48), (32, 16)])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_cpu_step_is_right_for_different_dims_of_keys_and_values(dims: tuple[int, int], bits: int) -> None:
    rng = np.random.default_rng(bits)
    shape = (3, 70, *dims)
    part = a_part(rng, (f"planes:{bits}", f"planes:{bits}"), shape)
    check(rng, [a_row(rng, [part], shape)], shape)


@pytest.mark.parametrize("dim", [4, 8, 24, 100])
def test_cpu_step_is_right_for_dims_that_16_lanes_do_not_divide(dim: int) -> None:
    rng = np.random.default_rng(dim)
    shape = (2, 70, dim, dim + 4)
    check(rng, [a_row(rng, [a_part(rng, ("raw", "raw"), shape)], shape)], shape)


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("names", [("raw", "raw"), ("planes:8", "planes:4")])
def test_cpu_step_is_right_for_query_groups_and_sinks(queries: int, names: tuple[str, str]) -> None:
    rng = np.random.default_rng(queries)
    shape = (2, 90, 64, 64)
    part = a_part(rng, names, shape)
    check(rng, [a_row(rng, [part], shape)], shape, queries, normal(rng, 2 * queries) * 4)


def test_cpu_step_result_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (3, 600, 64, 64)

    def out() -> np.ndarray:
        rng = np.random.default_rng(7)
        part = a_part(rng, ("planes:8", "planes:4"), shape, position=17)
        return check(rng, [a_row(rng, [part], (3, 50, 64, 64))], shape)

    monkeypatch.setattr(cpu_step, "PARALLEL_ASLEEP", 0)
    parallel = out()
    monkeypatch.setattr(cpu_step, "PARALLEL_ASLEEP", 1 << 40)
    assert np.array_equal(parallel, out())


def test_cpu_step_result_does_not_depend_on_other_rows() -> None:
    rng = np.random.default_rng(3)
    parts = [
        a_part(rng, names, (2, 200, 64, 64)) for names in (("planes:4", "raw"), ("raw", "raw"), ("raw", "planes:2"))
    ]
    tails = [(normal(rng, 1, 2, 40, 64), normal(rng, 1, 2, 40, 64)) for _ in parts]

    def rows() -> list[PartsRow]:
        return [PartsRow([part], tail) for part, tail in zip(parts, tails, strict=True)]

    keys, values, q = (normal(rng, 3, heads, 1, 64) for heads in (2, 2, 6))
    together = begin(rows(), keys, values).attend(q, 0.1, None)
    for i, row in enumerate(rows()):
        one = slice(i, i + 1)
        alone = begin([row], keys[one], values[one]).attend(q[one], 0.1, None)
        assert mx.array_equal(alone, together[one])


def test_cpu_step_reads_a_raw_segment_from_its_start() -> None:
    rng = np.random.default_rng(5)
    shape = (2, 40, 64, 64)
    k, v = normal(rng, 1, 2, 500, 64), normal(rng, 1, 2, 500, 64)
    check(rng, [a_row(rng, [RawSegment(k, v, 321, 77)], shape)], shape)


def test_cpu_step_reads_gathered_planes() -> None:
    rng = np.random.default_rng(6)
    shape = (2, 40, 64, 64)
    planes = PlanesCodec(8).encode(normal(rng, 4, 2, 300, 64))

    def layer(i: int) -> SealedSegment:
        arrays = {name: array[i] for name, array in planes.arrays.items()}
        one = EncodedArray(planes.codec, arrays, 300, 0, 64, planes.mean_runs)
        return SealedSegment(one, one)

    parts = [layer(i) for i in range(4)]
    assert all(cpu_step.run_of(part) is not None for part in parts)
    check(rng, [a_row(rng, parts, shape)], shape)


def test_cpu_step_reads_joined_segments_with_their_own_means() -> None:
    """K and V then have different mean runs."""
    rng = np.random.default_rng(8)
    codec, shape = PlanesCodec(4), (2, 40, 64, 64)
    k, v = normal(rng, 2, 400, 64), normal(rng, 2, 400, 64)
    v = mx.concatenate([v[:, :150], v[:, 150:] + 3], axis=1)
    joined = codec.join(codec.encode(v[:, :150], 5), codec.encode(v[:, 150:], 155))
    part = SealedSegment(codec.encode(k, 5), joined)
    assert part.k.mean_runs != part.v.mean_runs
    check(rng, [a_row(rng, [part, SegmentSlice(part, 140, 160)], shape)], shape)


@pytest.mark.parametrize("factor", [0.0, 1e-7, 1e-5, 30.0])
def test_cpu_step_is_right_for_vectors_at_the_limits_of_float16(factor: float) -> None:
    """Scales and means are zero or subnormal in float16, and scores differ widely."""
    rng = np.random.default_rng(9)
    shape = (2, 60, 64, 64)
    k, v = normal(rng, 1, 2, 300, 64) * factor, normal(rng, 1, 2, 300, 64) * min(factor, 1.0)
    part = sealed(k, v, PlanesCodec(8), PlanesCodec(4))
    assert np.isfinite(check(rng, [a_row(rng, [part], shape)], shape)).all()


def test_runs_are_none_for_segments_without_a_kernel() -> None:
    rng = np.random.default_rng(1)
    x = normal(rng, 2, 64, 64)
    planes, raw = PlanesCodec(8).encode(x), parse_for("raw", 64).encode(x)
    others = [parse_for("affine:8", 64).encode(x), parse_for("affine:4", 64).encode(x)]
    half = parse_for("raw", 64).encode(x.astype(mx.float16))
    for other in (*others, half):
        assert cpu_step.run_of(SealedSegment(planes, other)) is None
        assert cpu_step.run_of(SealedSegment(other, raw)) is None
        assert cpu_step.run_of(SegmentSlice(SealedSegment(other, raw), 3, 9)) is None
    gaps = mx.contiguous(normal(rng, 1, 64, 2, 64)).swapaxes(1, 2)
    for buffer in (x[None].astype(mx.float16), gaps):
        assert cpu_step.run_of(RawSegment(buffer, buffer, 64)) is None
    assert cpu_step.run_of(SegmentSlice(SealedSegment(planes, raw), 3, 9)) is not None


def test_run_keeps_arrays_but_not_its_segment() -> None:
    """A view that referred to its segment would be a cycle, and the segment's memory would wait for the collector."""
    segment = a_part(np.random.default_rng(2), ("planes:8", "raw"), (2, 64, 64, 64))
    run, alive, arrays = cpu_step.run_of(segment), weakref.ref(segment), segment.arrays()
    assert run is not None
    gc.disable()
    try:
        del segment
        assert alive() is None
    finally:
        gc.enable()
    assert {id(array) for array in arrays} <= {id(held) for held in run.holds}


def test_warm_up_compiles_all_kernels() -> None:
    from kvstrata.attention.cpu import kernels as cpu_kernels
    from kvstrata.codecs.cpu import kernels as codec_kernels

    kernels = [cpu_kernels.write, cpu_kernels.decode, codec_kernels.encode_planes]
    kernels += [codec_kernels.decode_planes, codec_kernels.score_planes, codec_kernels.mix_planes]
    cpu_step.warm_up()
    before = [len(kernel.signatures) for kernel in kernels]
    rng = np.random.default_rng(4)
    for bits, tokens in ((8, 100), (4, 3000), (2, 50)):
        shape = (2, tokens, 64, 80)
        part = a_part(rng, (f"planes:{bits}", f"planes:{bits}"), shape)
        for sinks in (None, normal(rng, 6).astype(mx.float16)):
            check(rng, [a_row(rng, [part], shape)], shape, sinks=sinks)
    assert [len(kernel.signatures) for kernel in kernels] == before


def test_second_warm_up_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_step.warm_up()

    def no_process(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(subprocess, "Popen", no_process)
    cpu_step.warm_up()


@pytest.mark.slow
def test_first_warm_up_compiles_in_two_processes(tmp_path: Path) -> None:
    code = """
import json, kvstrata
from kvstrata.attention.cpu import kernels, step
from kvstrata.codecs.cpu import kernels as codec_kernels
step.warm_up()
print(json.dumps([len(kernel.stats.cache_misses) for kernel in (kernels.decode, codec_kernels.mix_planes)]))
"""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, env=env, check=True
    )
    ours, of_codecs = json.loads(done.stdout)
    assert (ours, of_codecs) == (1, 0)


def test_warm_up_works_without_a_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no process can be started")

    monkeypatch.setattr(cpu_step, "_is_on_disk", lambda: False)
    monkeypatch.setattr(cpu_step.subprocess, "Popen", refuse)
    cpu_step.warm_up()


def test_built_on_is_the_digest_of_inlined_modules() -> None:
    from kvstrata.attention.cpu import delta_kernels as cpu_delta_kernels
    from kvstrata.attention.cpu import kernels as cpu_kernels
    from kvstrata.codecs.cpu import blocks as cpu_blocks
    from kvstrata.codecs.cpu import kernels as codec_kernels
    from kvstrata.codecs.cpu import vectors as cpu_vectors

    texts = [Path(str(module.__file__)).read_bytes() for module in (cpu_vectors, cpu_blocks)]
    wanted = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
    for module in (codec_kernels, cpu_kernels, cpu_delta_kernels):
        assert wanted == module.BUILT_ON, f"In {module.__name__} write: BUILT_ON = {wanted!r}"


@st.composite
def part_plans(draw: st.DrawFn) -> tuple[tuple[str, str], int, int, int, int]:
    """Codecs of K and V, position, tokens, and the range of them that is read"""
    tokens = draw(st.integers(1, 600))
    start = draw(st.integers(0, tokens - 1))
    end = draw(st.integers(start + 1, tokens))
    names = (draw(st.sampled_from(KEY_CODECS)), draw(st.sampled_from(CODECS)))
    return names, draw(st.integers(0, 600)), tokens, start, end


@settings(max_examples=40)
@given(
    rows=st.lists(st.lists(part_plans(), max_size=3), min_size=1, max_size=3),
    dims=st.sampled_from([(64, 64), (64, 96), (80, 16)]),
    heads=st.sampled_from([(1, 4), (2, 1), (3, 3)]),
    has_sinks=st.booleans(),
    tail=st.integers(1, 80),
    seed=st.integers(0, 2**32 - 1),
)
def test_cpu_step_is_right_for_rows_of_any_segments(
    rows: list[list[tuple[tuple[str, str], int, int, int, int]]],
    dims: tuple[int, int],
    heads: tuple[int, int],
    has_sinks: bool,
    tail: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, queries = heads
    made = []
    for plans in rows:
        parts: list[Segment] = []
        for names, position, tokens, start, end in plans:
            whole = a_part(rng, names, (kv_heads, tokens, *dims), position)
            parts.append(whole if end - start == tokens else SegmentSlice(whole, start, end))
        made.append(a_row(rng, parts, (kv_heads, tail, *dims)))
    sinks = normal(rng, kv_heads * queries) if has_sinks else None
    check(rng, made, (kv_heads, tail, *dims), queries, sinks)
