"""Scratch is remembered from one start to the next."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mlx.core as mx
import pytest

from kvstrata.codecs.backends import Trial, TrialKey, VectorKind, runtime
from kvstrata.engine import profiling
from kvstrata.engine.memory_plan import Scratch
from kvstrata.engine.profiling import PassShape, measure_scratch
from kvstrata.engine.runner import ModelRunner
from kvstrata.models.load import LoadedModel
from kvstrata.models.probe import probe
from tests.support.models import VOCAB, tiny_loaded

SHAPE = PassShape(rows=1, vocab_size=VOCAB, max_context_tokens=64, chunk_tokens=16)


class Starts:
    """Repeated starts of an engine, and the number of measurements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        monkeypatch.setenv("KVSTRATA_HOME", str(home))
        monkeypatch.setattr(profiling, "WORTH_KEEPING_S", 0.0)
        monkeypatch.setattr(profiling, "measure_scratch", self._measure)
        self.notes = home / "scratch.json"
        self.measured = 0
        self.loaded: LoadedModel = tiny_loaded("llama")
        self._runner = ModelRunner(self.loaded.module, probe(self.loaded.module, None))

    def _measure(self, runner: ModelRunner, shape: PassShape) -> Scratch:
        self.measured += 1
        return measure_scratch(runner, shape)

    def start(self, shape: PassShape = SHAPE, **changes: str) -> Scratch:
        return profiling.remembered_scratch(dataclasses.replace(self.loaded, **changes), self._runner, shape)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Starts:
    return Starts(monkeypatch, tmp_path)


def test_second_start_reuses_the_remembered_scratch(starts: Starts) -> None:
    assert starts.start() == starts.start()
    assert starts.measured == 1


def test_changed_model_or_shape_is_measured_again(starts: Starts) -> None:
    starts.start()
    starts.start(dataclasses.replace(SHAPE, chunk_tokens=8))
    starts.start(dataclasses.replace(SHAPE, rows=2))
    starts.start(fingerprint="other weights")
    assert starts.measured == 4


def test_changed_kernels_are_measured_again(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of speed chooses the kernels, so the choice may differ from start to start."""
    key = TrialKey("join", VectorKind(mx.float32, 64))
    for ours_ms in (1.0, 3.0, 1.5):
        monkeypatch.setattr(runtime(), "trials", {key: Trial("join", 0.0, 1.0, ours_ms, 2.0)})
        starts.start()
    assert starts.measured == 2


def test_changed_code_is_measured_again(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.start()
    monkeypatch.setattr(profiling, "source_digest", lambda _: "another version")
    starts.start()
    assert starts.measured == 2


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"KEY": 7}', '{"KEY": [[1]]}', '{"KEY": [["a", 1, true]]}'])
def test_damaged_notes_are_measured_again(starts: Starts, damage: str) -> None:
    starts.start()
    key = starts.notes.read_text().split('"')[1]
    starts.notes.write_text(damage.replace("KEY", key))
    starts.start()
    assert starts.measured == 2


def test_oldest_notes_are_dropped_beyond_the_limit(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MAX_NOTES", 3)
    for rows in range(1, 7):
        starts.start(dataclasses.replace(SHAPE, rows=rows))
    starts.start(dataclasses.replace(SHAPE, rows=6))
    assert starts.measured == 6
    starts.start(dataclasses.replace(SHAPE, rows=1))
    assert starts.measured == 7


def test_quick_measurement_is_not_remembered(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "WORTH_KEEPING_S", 60.0)
    starts.start()
    starts.start()
    assert starts.measured == 2
    assert not starts.notes.exists()
