"""A step that is prepared for all layers at once, beside one that asks layer by layer.

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
from tests.tiny import tiny_module

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
def test_a_planned_step_gives_the_logits_of_one_that_asks_layer_by_layer(architecture: str, walk: Walk) -> None:
    model = tiny_module(architecture)
    layout = probe(model)
    ours, theirs = _caches(model, layout), _caches(model, layout)
    batch, step = BatchCache(ours), CompiledStep(model)
    for number in range(4):
        tokens = mx.arange(len(LENGTHS)) + number
        got = step.run(tokens, batch)
        assert got is not None
        wanted = _layer_by_layer(model, theirs, tokens)
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()
    assert [cache.num_tokens for cache in ours] == [cache.num_tokens for cache in theirs]
    assert [layer.offset for cache in ours for layer in cache.flat] == [
        layer.offset for cache in theirs for layer in cache.flat
    ]
    assert walk.launches


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_is_tried_before_its_steps_are_compiled(
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
def test_a_plan_is_kept_until_something_changes() -> None:
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


@pytest.mark.usefixtures("walk")
def test_a_full_buffer_is_followed_by_another() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    ours, theirs = _caches(model, layout, capacity=42), _caches(model, layout, capacity=42)
    for cache in (*ours, *theirs):
        cache.grow(20)
    batch, step = BatchCache(ours), CompiledStep(model)
    for number in range(6):
        tokens = mx.arange(len(LENGTHS)) + number
        got = step.run(tokens, batch)
        assert got is not None
        wanted = _layer_by_layer(model, theirs, tokens)
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()


@pytest.mark.usefixtures("walk")
def test_steps_of_both_kinds_may_follow_each_other() -> None:
    model = tiny_module("gemma3_text")
    layout = probe(model)
    ours, theirs = _caches(model, layout, capacity=48), _caches(model, layout, capacity=48)
    batch, step = BatchCache(ours), CompiledStep(model)
    for number in range(8):
        tokens = mx.arange(len(LENGTHS)) + number
        got = step.run(tokens, batch) if number % 3 else None
        if got is None:
            got = model(tokens[:, None], cache=batch.begin_step())[:, -1]
            batch.end_step()
        wanted = _layer_by_layer(model, theirs, tokens)
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()
    assert ours[1].num_tokens == 48
    with pytest.raises(IndexError, match="do not fit"):
        batch.plan()


@pytest.mark.usefixtures("walk", "exact_buffers")
def test_nothing_is_kept_after_the_plan_has_ended() -> None:
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
def test_what_was_traced_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "MOST_SHAPES", 2)
    made: list[object] = []
    monkeypatch.setattr(mx, "compile", lambda function: made.append(function) or function)
    model = tiny_module("qwen3")
    layout = probe(model)
    caches, step = _caches(model, layout), CompiledStep(model)
    made.clear()
    for size in (1, 2, 1, 2, 3, 3, 2, 1):
        assert step.run(mx.arange(size), BatchCache(caches[:size])) is not None
    assert len(made) == 2


@pytest.mark.usefixtures("walk")
def test_what_another_sequence_still_writes_is_read_where_it_lies() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    owner = _caches(model, layout)[1]
    reader = SequenceCache(layout, model, 32, _beginning(owner))
    mx.eval(model(mx.array([[1, 2, 3]]), cache=reader.caches()), reader.arrays())
    reader.end_pass(3)
    batch, step = BatchCache([owner, reader]), CompiledStep(model)
    assert step.run(mx.array([1, 2]), batch) is not None
    first = batch.plan()
    owner.flat[0].own.encode_past_at_once(PlanesCodec(8), PlanesCodec(8), RawWindow(0, 4))
    assert step.run(mx.array([1, 2]), batch) is not None
    assert batch.plan() is not first


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_steps_of_a_mixed_pass_are_planned_too(architecture: str, walk: Walk) -> None:
    model = tiny_module(architecture)
    layout = probe(model)
    ours, theirs = _caches(model, layout), _caches(model, layout)
    batch, step = BatchCache(ours[:2]), CompiledStep(model)
    plans = []
    for number in range(4):
        tokens = mx.array([number, number + 1])
        wanted = _layer_by_layer(model, theirs[:2], tokens)
        if number % 2:
            got = step.run(tokens, batch)
        else:
            mixed = MixedPass([(ours[2], 3)], batch, is_planned=True)
            got = model(mx.concatenate([mx.array([7, 8, 9]), tokens])[:, None], cache=mixed.begin())[-2:, -1]
            mixed.end()
            _chunk(model, theirs[2], [7, 8, 9])
        assert got is not None
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()
        plans.append(batch.plan())
    assert plans[0] is not None
    assert all(plan is plans[0] for plan in plans), "a chunk of another sequence changes nothing for the streams"
    assert walk.launches
    got, wanted = (_chunk(model, caches[2], [1]) for caches in (ours, theirs))
    assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()


@pytest.mark.usefixtures("walk")
def test_a_stream_that_goes_on_from_a_chunks_buffer_is_not_planned() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    owner, wanted_owner = (_caches(model, layout)[1] for _ in range(2))
    ours = SequenceCache(layout, model, 8, _beginning(owner))
    theirs = SequenceCache(layout, model, 8, _beginning(wanted_owner))
    batch, step = BatchCache([ours]), CompiledStep(model)
    for number in range(3):
        token = mx.array([5 + number])
        wanted = _layer_by_layer(model, [theirs], token)
        _chunk(model, wanted_owner, [7, 8])
        mixed = MixedPass([(owner, 2)], batch, is_planned=True)
        assert not mixed.is_planned
        got = model(mx.array([7, 8, 5 + number])[:, None], cache=mixed.begin())[-1:, -1]
        mixed.end()
        mx.eval(got, owner.arrays())
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()
    assert step.run(mx.array([9]), batch) is not None, "a step without the chunk is"


def test_tokens_of_any_type_are_traced_once(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_module("qwen3")
    batch, given = BatchCache(_caches(model, probe(model))), []
    forward = CompiledStep._forward

    def watched(step: CompiledStep, tokens: mx.array, *rest: Any) -> mx.array:
        given.append(tokens.dtype)
        return forward(step, tokens, *rest)

    monkeypatch.setattr(CompiledStep, "_forward", watched)
    step = CompiledStep(model)
    for dtype in (mx.int32, mx.uint32, mx.int64):
        assert step.run(mx.arange(len(LENGTHS)).astype(dtype), batch) is not None
    assert given == [mx.int32] * 3
    assert walk.launches


def _chunk(model: Any, cache: SequenceCache, tokens: list[int]) -> mx.array:
    logits = model(mx.array([tokens]), cache=cache.caches())
    cache.end_pass(len(tokens))
    mx.eval(logits, cache.arrays())
    return logits[:, -1]


@pytest.mark.usefixtures("walk")
def test_each_number_of_rows_is_run_once_before_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_batch_that_seals_layer_by_layer_keeps_the_shape_that_was_traced() -> None:
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
def test_the_first_step_over_a_prompt_that_others_computed_is_planned() -> None:
    model = tiny_module("qwen3")
    layout = probe(model)
    owner = _caches(model, layout)[1]
    ours, theirs = (SequenceCache(layout, model, 8, _beginning(owner)) for _ in range(2))
    batch, step, tokens = BatchCache([ours]), CompiledStep(model), mx.array([5])
    for _ in range(3):
        got = step.run(tokens, batch)
        assert got is not None
        wanted = _layer_by_layer(model, [theirs], tokens)
        assert mx.abs(got - wanted).max() < 1e-4 * mx.abs(wanted).max()


def _beginning(owner: SequenceCache, num_tokens: int = 30) -> Prefix:
    sources = tuple((_Live(layer, num_tokens),) for layer in owner.flat)
    return Prefix(num_tokens, sources, (None,) * len(owner.flat))


class _Live:
    """The first tokens of a sequence that runs."""

    def __init__(self, layer: FullLayer, num_tokens: int) -> None:
        self._layer = layer
        self.num_tokens = num_tokens

    @property
    def version(self) -> int:
        return self._layer.own.buffers.version

    def segments(self) -> tuple[Any, ...]:
        return self._layer.own.segments(0, self.num_tokens)
