"""Trials of the portable decode kernel, and the choice between it and stock operations."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import mlx.core as mx
import pytest

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.attention.dispatch import attend, decode, decode_row_by_row, explain
from kvstrata.attention.metal import decode as metal_decode
from kvstrata.attention.metal import launch_plan as metal_launch_plan
from kvstrata.attention.metal import trials as metal_trials
from kvstrata.attention.metal.trials import DecodeKind
from kvstrata.attention.segments import SegmentedKV
from kvstrata.cli import selftest
from kvstrata.codecs import backends
from kvstrata.codecs.backends import HeadKind, KernelChoice, Trial, TrialKey, VectorKind, runtime
from kvstrata.codecs.metal.kernel_text import KernelLaunch
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.kv.attention_rows import AttentionRows
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.raw_window import RawWindow
from tests.attention.plain_kernels import Plain
from tests.attention.test_metal_decode import KV_HEADS, ONE_SHAPE, needs_compiler, queries, raw, sealed
from tests.codecs.arrays import keys

DIM, GROUP = 64, 2
KIND = DecodeKind(mx.float32, DIM, DIM, GROUP)


def step_choice(dtype: mx.Dtype = mx.float32) -> KernelChoice:
    """Return the explained path of decode steps."""
    choice, *_ = explain([HeadKind(VectorKind(dtype, DIM), VectorKind(dtype, DIM))])
    return choice


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a Mac runs it, with a trial of few kernels: each takes seconds to compile."""
    monkeypatch.setattr(metal_launch_plan, "SHAPES", ONE_SHAPE)
    monkeypatch.setattr(metal_trials, "RAW_CASES", ((0, 0, 2),))
    monkeypatch.setattr(metal_trials, "PLANES_CASES", ((1, 0, 1),))
    monkeypatch.setattr(runtime(), "trials", {})
    for name, number in (("TIMED_ROWS", 2), ("TIMED_RAW_TOKENS", 20), ("TIMED_TOKENS", 20), ("TIMED_LAYERS", 1)):
        monkeypatch.setattr(metal_trials, name, number)
    metal_launch_plan.plan.cache_clear()
    with backends.as_on_metal():
        yield
    metal_launch_plan.plan.cache_clear()


def _layers() -> list[FullLayer]:
    prefix = sealed("planes:8 halves", "planes:4", 300, DIM)
    layers = [FullLayer(40), FullLayer(400), FullLayer(30, [prefix])]
    for seed, (layer, count) in enumerate(zip(layers, (12, 300, 3), strict=True)):
        layer.append(*(keys(1, KV_HEADS, count, DIM, seed=20 + seed + i) for i in (0, 9)))
    layers[1].own.encode_past_at_once(PlanesCodec(4), PlanesCodec(4), RawWindow(4, 64))
    return layers


def _steps(layers: list[FullLayer]) -> mx.array:
    rows, out = AttentionRows(layers), []
    for step in range(3):
        k, v = (keys(len(layers), KV_HEADS, 1, DIM, seed=60 + 2 * step + i) for i in (0, 1))
        rows.begin_step(mx.array([layer.offset for layer in layers]))
        held, _ = rows.update_and_fetch(k, v)
        out.append(attend(queries(len(layers), GROUP, DIM, seed=step), held, held, rows, 0.1, None))
        rows.end_step()
    return mx.stack(out)


@needs_compiler
def test_batch_steps_with_the_kernel_equal_stock_steps() -> None:
    wanted, run = _steps(_layers()), Plain()
    with metal_trials.as_if_tried("plain", run):
        found = _steps(_layers())
    # In each step two launches for what the rows read, and one that combines.
    names = [launch.text.name for launch in run.launches]
    assert names == ["attend_segments", "attend_segments", "combine_partials"] * 3
    assert mx.abs(found - wanted).max() < 1e-4 * mx.abs(wanted).max()


@needs_compiler
def test_single_buffers_and_other_codecs_stay_with_mlx() -> None:
    run = Plain()
    with metal_trials.as_if_tried("plain", run):
        for rows in (((raw(9, DIM, 1),),), ((sealed("affine:8", "affine:8", 9, DIM), raw(9, DIM, 1)),)):
            q = queries(1, GROUP, DIM)
            assert mx.allclose(
                decode(q, SegmentedKV(rows), 0.1, None), decode_row_by_row(q, SegmentedKV(rows), 0.1, None)
            )
    assert not run.launches


@needs_compiler
def test_batch_with_too_many_launches_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal_launch_plan, "PARTIAL_COUNTS", (1,))
    run, rows = Plain(), SegmentedKV(tuple((raw(9 + i, DIM, i),) for i in range(5)))
    q = queries(5, GROUP, DIM)
    with metal_trials.as_if_tried("plain", run):
        found = decode(q, rows, 0.1, None)
    assert mx.abs(found - decode_row_by_row(q, rows, 0.1, None)).max() < 1e-4
    assert len(run.launches) == 2 * 2


def test_failed_step_falls_back_to_row_by_row(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: KernelLaunch) -> list[mx.array]:
        raise RuntimeError("no such kernel")

    rows = SegmentedKV(tuple((raw(9 + i, DIM, i),) for i in range(2)))
    q = queries(2, GROUP, DIM)
    with metal_trials.as_if_tried("plain", fails), caplog.at_level(logging.WARNING):
        found = [decode(q, rows, 0.1, None) for _ in range(3)]
    assert mx.allclose(found[0], decode_row_by_row(q, rows, 0.1, None))
    assert caplog.text.count("no such kernel") == 1


def _tried(run: object) -> tuple[Trial, ...]:
    with metal_trials.as_if_tried("plain", run):  # pyright: ignore[reportArgumentType]
        return metal_trials.trials(KIND)


@needs_compiler
def test_trial_accepts_a_right_and_faster_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        slow = _tried(Plain())
    assert all(trial.is_right and not trial.is_used for trial in slow)
    assert "raw: MLX (" in caplog.text
    assert step_choice().backend == "stock"
    assert step_choice().reason.startswith("raw: MLX (")
    monkeypatch.setattr(runtime(), "trials", {})
    monkeypatch.setattr(metal_trials, "_milliseconds", lambda *_: [1.0, 2.5])
    fast = _tried(Plain())
    assert all(trial.is_used for trial in fast)
    assert step_choice().backend == "metal"
    assert step_choice().reason == "raw: own (1 ms, MLX 2.5)"
    assert step_choice(mx.float16).backend == "stock"


@needs_compiler
def test_trial_rejects_a_wrong_or_failing_kernel() -> None:
    class Wrong(Plain):
        def __call__(self, launch: KernelLaunch) -> list[mx.array]:
            return [made * 1.01 for made in super().__call__(launch)]

    class NotANumber(Plain):
        def __call__(self, launch: KernelLaunch) -> list[mx.array]:
            return [made * float("nan") for made in super().__call__(launch)]

    def fails(_: KernelLaunch) -> list[mx.array]:
        raise ValueError("cannot be compiled")

    for run, said in ((Wrong(), "is off by"), (NotANumber(), "is off by nan"), (fails, "cannot be compiled")):
        runtime().trials.clear()
        trials = _tried(run)
        assert not any(trial.is_used for trial in trials)
        assert all(said in str(trial) for trial in trials)
        assert said in step_choice().reason


def test_kernel_is_used_only_after_an_accepting_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw rows and planes are decided separately; without a trial no kernel is used."""
    q = queries(1, GROUP, DIM)
    coded, plain = (
        [[metal_decode.read_of(sealed("planes:4", "planes:4", 9, DIM))]],
        [[metal_decode.read_of(raw(9, DIM, 1))]],
    )
    right, slow = Trial("raw", 0.0, 1.0, 1.0, 2.0), Trial("planes", 0.0, 1.0, 2.0, 1.0)
    monkeypatch.setattr(runtime(), "trials", {TrialKey("raw", KIND): right, TrialKey("planes", KIND): slow})
    assert metal_trials.is_used(q, plain)
    assert not metal_trials.is_used(q, coded)
    monkeypatch.setattr(runtime(), "trials", {TrialKey("raw", KIND): slow, TrialKey("planes", KIND): right})
    assert not metal_trials.is_used(q, plain)
    assert metal_trials.is_used(q, coded)
    assert not metal_trials.is_used(q, [[None]])


def test_trial_runs_every_kernel_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shapes, counts = set(), set()
    for case in (*metal_trials.RAW_CASES, *metal_trials.PLANES_CASES):
        parts = metal_trials.case_segments(KIND, *case)
        step = metal_decode.step_of(
            queries(1, GROUP, DIM), [[metal_decode.read_of(part) for part in parts]], 0.1, None, "plain"
        )
        assert step is not None
        shapes |= {len(launch.arrays) for launch in step.plan.launches}
        shapes |= {launch.text.inputs for launch in step.plan.launches}
        counts.add(step.plan.combine.num_partials)
    assert {("q", "table", "angles", *shape.names) for shape in metal_launch_plan.SHAPES} <= shapes
    assert counts == {*metal_launch_plan.PARTIAL_COUNTS}


def test_no_trial_runs_without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert metal_trials.dialect() is None
    assert metal_trials.report([KIND]) == []
    assert selftest.kernels()["decode_step_trials"] == []
    assert step_choice().backend == "stock"
    assert not cpu_step.available()
