"""CUDA steps of a batch: the tables that layers pass to the kernel.

The kernel itself needs a GPU (tests/attention/test_cuda_kernels.py). Here a few lines of numpy read its tables, and the
results are compared with attention by sequence.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda import ranges as cuda_ranges
from kvstrata.attention.cuda import step as cuda_step
from kvstrata.attention.cuda import trials as cuda_trials
from kvstrata.attention.cuda.trials import step_works
from kvstrata.attention.dispatch import attend
from kvstrata.attention.segments import SealedSegment, Segment, SegmentedKV, SegmentSlice
from kvstrata.codecs import backends
from kvstrata.codecs.cuda.planes import RAW_BITS
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.kv.attention_rows import AttentionRows
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.buffers import KvShape
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.window_layer import WindowLayer
from tests.attention.table_walk import Walk
from tests.codecs.arrays import keys

pytestmark = pytest.mark.skipif(
    mx.cuda.is_available(), reason="where there is a GPU the kernel is tried first, and test_cuda.py tests it"
)

HEADS, DIM, SCALE = 2, 64, 0.1
DTYPE = mx.bfloat16
SHAPE = KvShape(HEADS, DIM, DIM, DTYPE)
LAYOUT = Layout((LayerSpec("full", kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype=DTYPE),) * 2, batching="batched")


def _prefix(
    codec: PlanesCodec | RawCodec, num_tokens: int, seed: int, v_codec: PlanesCodec | None = None
) -> SealedSegment:
    k, v = (keys(HEADS, num_tokens, DIM, seed=seed + i, dtype=DTYPE) for i in (0, 1))
    return SealedSegment(codec.encode(k, 0), (v_codec or codec).encode(v, 0))


class _Cut:
    """A prefix that others read more of."""

    def __init__(self, part: SegmentSlice) -> None:
        self._part = part
        self.num_tokens = part.num_tokens
        self.version: Hashable = 0

    def segments(self) -> tuple[SegmentSlice]:
        return (self._part,)


def _layers() -> list[FullLayer | WindowLayer]:
    planes, raw = _prefix(PlanesCodec(8), 90, 1), _prefix(RawCodec(), 70, 3)
    plain, sealed, grown = FullLayer(40), FullLayer(400), FullLayer(14, [_Cut(SegmentSlice(raw, 5, 60))], shape=SHAPE)
    stepping = _prefix(RawCodec(), 300, 7, PlanesCodec(8))  # V goes before K
    shares = FullLayer(30, [planes, _Cut(SegmentSlice(planes, 0, 31)), stepping, _Owner(plain, 11)])
    for seed, (layer, count) in enumerate([(plain, 12), (sealed, 300), (shares, 3), (grown, 13)]):
        layer.append(*(keys(1, HEADS, count, DIM, seed=20 + seed + i, dtype=DTYPE) for i in (0, 9)))
    sealed.own.encode_past_at_once(PlanesCodec(4), PlanesCodec(4), RawWindow(4, 128))
    grown.grow(20)
    ring = WindowLayer(16, keep=4)
    ring.append(*(keys(1, HEADS, 21, DIM, seed=40 + i, dtype=DTYPE) for i in (0, 9)))
    ring.end_pass()
    return [plain, sealed, grown, shares, ring]


class _Owner:
    """The first tokens of a sequence that still runs."""

    def __init__(self, layer: FullLayer, num_tokens: int) -> None:
        self._layer = layer
        self.num_tokens = num_tokens

    @property
    def version(self) -> Hashable:
        return self._layer.own.buffers.version

    def segments(self) -> tuple[Segment, ...]:
        return self._layer.own.segments(0, self.num_tokens)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[cuda_step.StepLaunch]:
    monkeypatch.setattr(cpu_step, "fits", lambda *_: False)
    walk = Walk()
    walk.install(monkeypatch)
    return walk.launches


def _run(layers: list[FullLayer | WindowLayer], num_steps: int, sinks: mx.array | None) -> mx.array:
    rows = AttentionRows(layers)
    out = []
    for step in range(num_steps):
        k, v = (keys(len(layers), HEADS, 1, DIM, seed=60 + 2 * step + i, dtype=DTYPE) for i in (0, 1))
        q = keys(len(layers), 3 * HEADS, 1, DIM, seed=80 + step, dtype=DTYPE)
        rows.begin_step(mx.array([layer.offset for layer in layers]))
        held, _ = rows.update_and_fetch(k, v)
        out.append(attend(q, held, held, rows, SCALE, None, sinks))
        rows.end_step()
    return mx.stack(out).astype(mx.float32)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_step_of_a_batch_equals_attention_by_sequence(
    monkeypatch: pytest.MonkeyPatch, launches: list[cuda_step.StepLaunch], with_sinks: bool
) -> None:
    sinks = mx.arange(3 * HEADS).astype(DTYPE) if with_sinks else None
    monkeypatch.setattr(cuda_trials, "step_takes", lambda *_: False)
    wanted = _run(_layers(), 6, sinks)
    assert not launches
    monkeypatch.setattr(cuda_trials, "step_takes", lambda keys, _: keys.shape[2] == 1)
    layers = _layers()
    got = _run(layers, 6, sinks)
    assert len(launches) == 6
    assert mx.abs(got - wanted).max() < 0.02 * mx.abs(wanted).max()
    monkeypatch.setattr(cuda_trials, "step_takes", lambda *_: False)
    by_sequence = _layers()
    _run(by_sequence, 6, sinks)
    for ours, theirs in zip(layers, by_sequence, strict=True):
        assert ours.offset == theirs.offset
        assert [part.num_tokens for part in ours.segments()] == [part.num_tokens for part in theirs.segments()]


@pytest.mark.usefixtures("exact_buffers")
def test_step_keeps_no_replaced_segment_alive(
    monkeypatch: pytest.MonkeyPatch, launches: list[cuda_step.StepLaunch]
) -> None:
    """Sealed or stepped down between two steps, by a sequence that ran alone before it joined the batch."""
    monkeypatch.setattr(cuda_trials, "step_takes", lambda keys, _: keys.shape[2] == 1)
    layers = [FullLayer(3000), FullLayer(100)]
    for layer, count in zip(layers, (2900, 10), strict=True):
        layer.append(*(keys(1, HEADS, count, DIM, seed=i, dtype=DTYPE) for i in (0, 1)))
        mx.eval(layer.arrays())
    k, q = keys(1, HEADS, 1, DIM, dtype=DTYPE), keys(1, HEADS, 1, DIM, seed=1, dtype=DTYPE)
    held = layers[0].update_and_fetch(k, k)
    mx.eval(attend(q, *held, layers[0], SCALE, None))
    layers[0].end_pass()
    del held
    rows = AttentionRows(layers)
    mx.eval(_steps(rows, layers))
    launches.clear()
    gc.collect()
    before = mx.get_active_memory()
    raw_bytes = layers[0].nbytes
    layers[0].own.encode_past_at_once(PlanesCodec(4), PlanesCodec(4), RawWindow(4, 128))
    mx.eval(*(array for part in layers[0].own.sealed for array in part.arrays()))
    gc.collect()
    assert before - mx.get_active_memory() == pytest.approx(raw_bytes - layers[0].nbytes, rel=0.02)
    mx.eval(_steps(rows, layers))
    assert [_bits(made) for made in launches] == [[RAW_BITS, 4, RAW_BITS, RAW_BITS]]


@pytest.mark.skipif(backends.runtime().backend == "cuda", reason="a GPU's allocator does not count to the byte")
@pytest.mark.usefixtures("exact_buffers", "launches")
@pytest.mark.parametrize("alone", [True, False])
def test_end_pass_issues_launches(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """What they write MLX does not know of: a pass whose result nobody asks for has to be issued all the same."""
    result_bytes = 8 << 20
    monkeypatch.setattr(cuda_trials, "step_takes", lambda keys, _: keys.shape[2] == 1)
    monkeypatch.setattr(cuda_step, "attend_step", lambda *_: mx.ones((result_bytes // 4,), mx.float32))
    caches = [SequenceCache(LAYOUT, None, 16) for _ in range(2)]
    batch = BatchCache(caches)
    called = caches[0].caches() if alone else batch.begin_step()
    k = keys(1 if alone else 2, HEADS, 1, DIM, dtype=DTYPE)
    mx.eval(k)
    before = mx.get_active_memory()
    kept = []
    for cache in called:
        held, _ = cache.update_and_fetch(k, k)
        kept.append(attend(k, held, held, cache, SCALE, None))
    assert mx.get_active_memory() - before < result_bytes
    caches[0].end_pass(1) if alone else batch.end_step()
    mx.synchronize()
    assert mx.get_active_memory() - before >= 2 * result_bytes
    assert len(kept) == 2


@pytest.mark.usefixtures("launches")
def test_layers_that_share_keys_read_the_new_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_trials, "step_takes", lambda keys, _: keys.shape[2] == 1)
    k = keys(1, HEADS, 1, DIM, dtype=DTYPE)
    for layer in (FullLayer(16, shape=SHAPE), WindowLayer(16, shape=SHAPE)):
        held, _ = layer.update_and_fetch(k, k)
        assert isinstance(held, cuda_step.CudaStep)
        attend(k, held, held, layer, SCALE, None)
        assert layer.keys_and_values() == (held, held)
        layer.end_pass()
        assert isinstance(layer.keys_and_values()[0], SegmentedKV)


def _steps(rows: AttentionRows, layers: list[FullLayer]) -> mx.array:
    k = keys(len(layers), HEADS, 1, DIM, dtype=DTYPE)
    rows.begin_step(mx.array([layer.offset for layer in layers]))
    held, _ = rows.update_and_fetch(k, k)
    out = attend(k, held, held, rows, SCALE, None)
    rows.end_step()
    return out


def test_rows_with_equal_segments_share_tables(
    monkeypatch: pytest.MonkeyPatch, launches: list[cuda_step.StepLaunch]
) -> None:
    monkeypatch.setattr(cuda_trials, "step_takes", lambda keys, _: keys.shape[2] == 1)
    planes, raw = _prefix(PlanesCodec(8), 90, 1), _prefix(RawCodec(), 70, 3)
    ends = range(20, 60, 2)
    before = [[_Cut(SegmentSlice(planes, 0, end)), _Cut(SegmentSlice(raw, 3, end))] for end in ends]
    layers = [FullLayer(8, cuts, shape=SHAPE) for cuts in before]
    _run(list(layers), 1, None)
    (made,) = launches
    assert sorted(_bits(made)) == [8, *[RAW_BITS] * (1 + len(layers))]


def _bits(launch: cuda_step.StepLaunch) -> list[int]:
    """Of the keys of each part."""
    return [int(bits) for bits in np.asarray(launch.kinds)[:, 0] if bits]


def test_layers_of_equal_form_share_tables(
    monkeypatch: pytest.MonkeyPatch, launches: list[cuda_step.StepLaunch]
) -> None:
    monkeypatch.setattr(cuda_trials, "step_takes", lambda keys, _: keys.shape[2] == 1)
    before = [[_prefix(PlanesCodec(8), 90, seed)] for seed in (1, 2)]
    layers = [[FullLayer(40, parts, shape=SHAPE) for _ in range(2)] for parts in before]
    for rows in layers:
        _run(list(rows), 3, None)
    first, second = launches[:3], launches[3:]
    for a, b in zip(first, second, strict=True):
        assert a.pieces is b.pieces
        assert a.kinds is b.kinds
        assert a.places is b.places
    assert len({id(made.pieces) for made in launches}) == 1
    assert len({id(made.addresses) for made in first}) == 1
    assert first[0].addresses is not second[0].addresses


@pytest.mark.usefixtures("launches")
def test_step_finds_moved_arrays_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that MLX has written to may lie elsewhere after that."""
    monkeypatch.setattr(cuda_trials, "step_takes", lambda keys, _: keys.shape[2] == 1)
    layer = FullLayer(40)
    layer.append(*(keys(1, HEADS, 9, DIM, seed=i, dtype=DTYPE) for i in (0, 1)))
    known = cuda_step.LaunchState()

    def reads() -> cuda_step.StepReads | None:
        return known.reads([[]], [layer.next_slot()])

    first = reads()
    assert reads() is first
    layer.count_next()
    assert reads() is first
    layer.append(*(keys(1, HEADS, 2, DIM, seed=i, dtype=DTYPE) for i in (0, 1)))
    assert reads() is not first


def test_launch_takes_any_number_of_segments(
    monkeypatch: pytest.MonkeyPatch, launches: list[cuda_step.StepLaunch]
) -> None:
    def layers() -> list[FullLayer | WindowLayer]:
        bits = [8, 4, 2, 4, 8]
        return [
            FullLayer(
                8, [_prefix(PlanesCodec(bits[i % 5]), 20 + i, 10 * row + i) for i in range(1 + 3 * row)], shape=SHAPE
            )
            for row in range(7)
        ]

    monkeypatch.setattr(cuda_trials, "step_takes", lambda *_: False)
    wanted = _run(layers(), 2, None)
    monkeypatch.setattr(cuda_trials, "step_takes", lambda keys, _: keys.shape[2] == 1)
    got = _run(layers(), 2, None)
    assert [len(_bits(made)) for made in launches] == [70 + 7] * 2
    assert mx.abs(got - wanted).max() < 0.02 * mx.abs(wanted).max()


def test_unsupported_launch_falls_back_to_attention_by_sequence(
    monkeypatch: pytest.MonkeyPatch, launches: list[cuda_step.StepLaunch]
) -> None:
    """Buffers of two dtypes."""
    raw = [keys(HEADS, 20, DIM, seed=seed, dtype=mx.float16) for seed in (1, 2)]
    before = SealedSegment(*(RawCodec().encode(x, 0) for x in raw))
    layers = [FullLayer(8, [before], shape=SHAPE), FullLayer(8, shape=SHAPE)]
    monkeypatch.setattr(cuda_trials, "step_takes", lambda keys, _: keys.shape[2] == 1)
    got = _run(list(layers), 2, None)
    assert not launches
    assert [layer.offset for layer in layers] == [22, 2]
    assert mx.isfinite(got).all()


def test_wrong_or_failing_kernel_is_not_used(
    monkeypatch: pytest.MonkeyPatch, launches: list[cuda_step.StepLaunch]
) -> None:
    right = cuda_step.attend_step

    def wrong(*args: Any) -> mx.array:
        return right(*args) * 1.1

    def writes_elsewhere(q: mx.array, k: mx.array, v: mx.array, launch: cuda_step.StepLaunch, *rest: Any) -> mx.array:
        places = np.array(launch.places)
        places[:, 1] -= 1
        return right(q, k, v, launch._replace(places=mx.array(places)), *rest)

    def fails(*_: Any) -> mx.array:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(cuda_trials, "runtime", lambda: SimpleNamespace(backend="cuda"))
    for launch, works in ((right, True), (wrong, False), (writes_elsewhere, False), (fails, False)):
        monkeypatch.setattr(cuda_step, "attend_step", launch)
        backends.runtime().checks.clear()
        assert step_works(DTYPE, DIM, DIM) == works
    backends.runtime().checks.clear()
    assert launches


def test_raw_segments_of_two_dtypes_are_not_in_one_launch() -> None:
    half, brain = (cuda_ranges.RawRange(x, x, 0, 4) for x in (mx.zeros((1, 2, 4, DIM), d) for d in (mx.float16, DTYPE)))
    assert cuda_ranges.fit_together([half, half])
    assert not cuda_ranges.fit_together([half, brain])
