"""Compiled decode steps, planned for all layers at once, compared with steps layer by layer.

The kernel needs a GPU: here its tables are walked (tests/attention/table_walk.py), and MLX's compiler is off, because
it hands out arrays that have no values yet.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.cuda import trials as cuda_trials
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.engine.runner import ModelRunner
from kvstrata.kv import decode_step
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.decode_plan import DecodePlan
from kvstrata.kv.decode_step import CompiledStep
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import Layout
from kvstrata.kv.mixed_pass import MixedPass
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.sequence_cache import Prefix, SequenceCache
from kvstrata.models.probe import probe
from tests.attention.table_walk import Walk
from tests.support.models import tiny_module

ARCHITECTURES = ["qwen3", "gemma3_text", "gpt_oss", "gemma4_text"]
LENGTHS = (7, 40, 21)


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Walk]:
    walk = Walk()
    walk.install(monkeypatch)
    monkeypatch.setattr(cpu_step, "fits", lambda *_: False)
    monkeypatch.setattr(cuda_trials, "step_works", lambda *_: True)
    for name in ("cuda.step.fits", "cuda.ranges.fits", "cuda.ranges._raw_fits"):
        monkeypatch.setattr(f"kvstrata.attention.{name}", lambda *_: True)
    mx.disable_compile()
    yield walk
    mx.enable_compile()


def _caches(model: Any, layout: Layout, capacity: int = 64) -> list[SequenceCache]:
    caches = [SequenceCache(layout, model, capacity) for _ in LENGTHS]
    for seed, (cache, length) in enumerate(zip(caches, LENGTHS, strict=True)):
        model(mx.array([[(seed + 3 * t) % 90 for t in range(length)]]), cache=cache.caches())
        cache.end_pass(length)
        mx.eval(cache.arrays())
    return caches


def _layer_by_layer(model: Any, caches: list[SequenceCache], tokens: mx.array) -> mx.array:
    batch = BatchCache(caches)
    logits = model(tokens[:, None], cache=batch.begin_step())
    batch.end_step()
    return logits[:, -1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_planned_step_has_the_logits_of_a_step_layer_by_layer(architecture: str, walk: Walk) -> None:
    model = tiny_module(architecture)
    layout = probe(model)
    planned, layerwise = _caches(model, layout), _caches(model, layout)
    batch, step = BatchCache(planned), CompiledStep(model)
    for number in range(4):
        tokens = mx.arange(len(LENGTHS)) + number
        got = step.run(tokens, batch)
        assert got is not None
        wanted = _layer_by_layer(model, layerwise, tokens)
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()
    assert [cache.num_tokens for cache in planned] == [cache.num_tokens for cache in layerwise]
    assert [layer.offset for cache in planned for layer in cache.flat] == [
        layer.offset for cache in layerwise for layer in cache.flat
    ]
    assert walk.launches


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_probe_disables_compiled_steps_when_their_logits_differ(
    architecture: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvstrata.models.probe.can_compile", lambda layout: layout.batching == "batched")
    model = tiny_module(architecture)
    assert probe(model).compiles
    run = CompiledStep.run
    monkeypatch.setattr(CompiledStep, "run", lambda step, tokens, batch: run(step, tokens * 0, batch))
    with caplog.at_level("WARNING"):
        layout = probe(model)
    assert layout.batching == "batched"
    assert not layout.compiles
    assert "not compiled" in caplog.text


@pytest.mark.usefixtures("walk")
def test_plan_is_reused_until_a_version_changes() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    caches = _caches(model, layout)
    batch, step = BatchCache(caches), CompiledStep(model)
    tokens = mx.arange(len(LENGTHS))

    def plan_after_a_step() -> DecodePlan:
        assert step.run(tokens, batch) is not None
        plan = batch.plan()
        assert plan is not None
        return plan

    first = plan_after_a_step()
    assert plan_after_a_step() is first
    layer = caches[1].layers[1]
    assert isinstance(layer, FullLayer)
    layer.own.encode_past_at_once(PlanesCodec(8), PlanesCodec(8), RawWindow(0, 4))
    second = plan_after_a_step()
    assert second is not first
    assert plan_after_a_step() is second
    assert [a is b for a, b in zip(first.layers, second.layers, strict=True)] == [True, False]


@pytest.mark.usefixtures("walk", "exact_buffers")
def test_planned_step_continues_in_the_next_buffer_when_one_is_full() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    planned, layerwise = _caches(model, layout, capacity=42), _caches(model, layout, capacity=42)
    for cache in (*planned, *layerwise):
        cache.grow(20)
    batch, step = BatchCache(planned), CompiledStep(model)
    for number in range(6):
        tokens = mx.arange(len(LENGTHS)) + number
        got = step.run(tokens, batch)
        assert got is not None
        wanted = _layer_by_layer(model, layerwise, tokens)
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()


@pytest.mark.usefixtures("walk", "exact_buffers")
def test_planned_and_layerwise_steps_alternate() -> None:
    model = tiny_module("gemma3_text")
    layout = probe(model)
    planned, layerwise = _caches(model, layout, capacity=48), _caches(model, layout, capacity=48)
    batch, step = BatchCache(planned), CompiledStep(model)
    for number in range(8):
        tokens = mx.arange(len(LENGTHS)) + number
        got = step.run(tokens, batch) if number % 3 else None
        if got is None:
            got = model(tokens[:, None], cache=batch.begin_step())[:, -1]
            batch.end_step()
        wanted = _layer_by_layer(model, layerwise, tokens)
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()
    assert planned[1].num_tokens == 48
    with pytest.raises(IndexError, match="do not fit"):
        batch.plan()


@pytest.mark.usefixtures("walk", "exact_buffers")
def test_released_batch_keeps_no_buffer_alive() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    caches = _caches(model, layout, capacity=4096)
    batch, step = BatchCache(caches), CompiledStep(model)
    mx.eval(step.run(mx.arange(len(LENGTHS)), batch))
    held = sum(cache.nbytes for cache in caches)
    batch.release()
    mx.synchronize()
    gc.collect()
    before = mx.get_active_memory()
    del caches, batch
    gc.collect()
    assert before - mx.get_active_memory() == pytest.approx(held, rel=0.02)


@pytest.mark.usefixtures("walk")
def test_traced_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "MOST_SHAPES", 2)
    compiled: list[object] = []
    monkeypatch.setattr(mx, "compile", lambda function: compiled.append(function) or function)
    model = tiny_module("qwen3")
    layout = probe(model)
    caches, step = _caches(model, layout), CompiledStep(model)
    compiled.clear()
    for size in (1, 2, 1, 2, 3, 3, 2, 1):
        assert step.run(mx.arange(size), BatchCache(caches[:size])) is not None
    assert len(compiled) == 2


@pytest.mark.usefixtures("walk")
def test_planned_step_reads_a_live_prefix_until_its_owner_seals_it() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    owner = _caches(model, layout)[1]
    reader = SequenceCache(layout, model, 32, _live_prefix(owner))
    mx.eval(model(mx.array([[1, 2, 3]]), cache=reader.caches()), reader.arrays())
    reader.end_pass(3)
    batch, step = BatchCache([owner, reader]), CompiledStep(model)
    assert step.run(mx.array([1, 2]), batch) is not None
    first = batch.plan()
    owner.flat[0].own.encode_past_at_once(PlanesCodec(8), PlanesCodec(8), RawWindow(0, 4))
    assert step.run(mx.array([1, 2]), batch) is not None
    assert batch.plan() is not first


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_pass_runs_decode_rows_from_the_plan(architecture: str, walk: Walk) -> None:
    model = tiny_module(architecture)
    layout = probe(model)
    planned, layerwise = _caches(model, layout), _caches(model, layout)
    batch, step = BatchCache(planned[:2]), CompiledStep(model)
    plans = []
    for number in range(4):
        tokens = mx.array([number, number + 1])
        wanted = _layer_by_layer(model, layerwise[:2], tokens)
        if number % 2:
            got = step.run(tokens, batch)
        else:
            mixed = MixedPass([(planned[2], 3)], batch, is_planned=True)
            got = model(mx.concatenate([mx.array([7, 8, 9]), tokens])[:, None], cache=mixed.begin())[-2:, -1]
            mixed.end()
            _run_chunk(model, layerwise[2], [7, 8, 9])
        assert got is not None
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()
        plans.append(batch.plan())
    assert plans[0] is not None
    assert all(plan is plans[0] for plan in plans), "a chunk of another sequence changes nothing for the decode rows"
    assert walk.launches
    got, wanted = (_run_chunk(model, caches[2], [1]) for caches in (planned, layerwise))
    assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()


@pytest.mark.usefixtures("walk")
def test_mixed_pass_is_not_planned_when_a_row_reads_the_chunks_buffer() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    owner, wanted_owner = (_caches(model, layout)[1] for _ in range(2))
    planned = SequenceCache(layout, model, 8, _live_prefix(owner))
    layerwise = SequenceCache(layout, model, 8, _live_prefix(wanted_owner))
    batch, step = BatchCache([planned]), CompiledStep(model)
    for number in range(3):
        token = mx.array([5 + number])
        wanted = _layer_by_layer(model, [layerwise], token)
        _run_chunk(model, wanted_owner, [7, 8])
        mixed = MixedPass([(owner, 2)], batch, is_planned=True)
        assert not mixed.is_planned
        got = model(mx.array([7, 8, 5 + number])[:, None], cache=mixed.begin())[-1:, -1]
        mixed.end()
        mx.eval(got, owner.arrays())
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()
    assert step.run(mx.array([9]), batch) is not None, "a step without the chunk is planned"


def test_token_dtypes_share_one_trace(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_module("qwen3")
    batch, dtypes = BatchCache(_caches(model, probe(model))), []
    forward = CompiledStep._forward

    def watched(step: CompiledStep, tokens: mx.array, *rest: Any) -> mx.array:
        dtypes.append(tokens.dtype)
        return forward(step, tokens, *rest)

    monkeypatch.setattr(CompiledStep, "_forward", watched)
    step = CompiledStep(model)
    for dtype in (mx.int32, mx.uint32, mx.int64):
        assert step.run(mx.arange(len(LENGTHS)).astype(dtype), batch) is not None
    assert dtypes == [mx.int32] * 3
    assert walk.launches


def _run_chunk(model: Any, cache: SequenceCache, tokens: list[int]) -> mx.array:
    logits = model(mx.array([tokens]), cache=cache.caches())
    cache.end_pass(len(tokens))
    mx.eval(logits, cache.arrays())
    return logits[:, -1]


@pytest.mark.usefixtures("walk")
def test_trace_steps_runs_each_number_of_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_module("qwen3")
    layout = dataclasses.replace(probe(model), compiles=True)
    rows: list[int] = []
    run = CompiledStep.run
    monkeypatch.setattr(
        CompiledStep, "run", lambda step, tokens, batch: rows.append(len(tokens)) or run(step, tokens, batch)
    )
    ModelRunner(model, layout).trace_steps(5)
    assert rows == [1, 2, 3, 4, 5]
    ModelRunner(model, dataclasses.replace(layout, compiles=False)).trace_steps(5)
    assert len(rows) == 5


@pytest.mark.usefixtures("walk")
def test_sealing_layer_by_layer_keeps_the_traced_shape() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    caches = _caches(model, layout)
    batch, step = BatchCache(caches), CompiledStep(model)
    tokens = mx.arange(len(LENGTHS))
    for layer in (None, *caches[1].layers):
        if isinstance(layer, FullLayer):
            layer.own.encode_past_at_once(PlanesCodec(8), PlanesCodec(8), RawWindow(0, 4))
        assert step.run(tokens, batch) is not None
    assert step.num_traced == 1


@pytest.mark.usefixtures("walk")
def test_first_step_over_a_shared_prefix_is_planned() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    owner = _caches(model, layout)[1]
    planned, layerwise = (SequenceCache(layout, model, 8, _live_prefix(owner)) for _ in range(2))
    batch, step, tokens = BatchCache([planned]), CompiledStep(model), mx.array([5])
    for _ in range(3):
        got = step.run(tokens, batch)
        assert got is not None
        wanted = _layer_by_layer(model, [layerwise], tokens)
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()


def _live_prefix(owner: SequenceCache, num_tokens: int = 30) -> Prefix:
    sources = tuple((_LivePrefix(layer, num_tokens),) for layer in owner.flat)
    return Prefix(num_tokens, sources, (None,) * len(owner.flat))


class _LivePrefix:
    """The first tokens of a running sequence, as a segment source."""

    def __init__(self, layer: FullLayer, num_tokens: int) -> None:
        self._layer = layer
        self.num_tokens = num_tokens

    @property
    def version(self) -> int:
        return self._layer.own.buffers.version

    def segments(self) -> tuple[Any, ...]:
        return self._layer.own.segments(0, self.num_tokens)
