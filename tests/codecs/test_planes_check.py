"""When planes are made and read by the portable kernels: tried on the machine, beside MLX's operations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import get_args

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs import backends
from kvstrata.codecs import dispatch as codec_dispatch
from kvstrata.codecs import trials as codec_trials
from kvstrata.codecs.backends import HeadKind, Trial, VectorKind, runtime
from kvstrata.codecs.metal.kernel_text import KernelLaunch
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.trials import PlanesCase, RangeCase, What
from tests.attention.plain_kernels import COMPILER, Plain
from tests.codecs.arrays import keys, some_rotation

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
KIND = VectorKind(mx.float32, 64)


@pytest.fixture(autouse=True)
def as_on_metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runtime(), "trials", {})
    for name, number in (("TIMED_HEADS", 1), ("TIMED_TOKENS", 16), ("ROUNDS", 1)):
        monkeypatch.setattr(codec_trials, name, number)
    cases = tuple(PlanesCase(4, rotation, num_tokens=80) for rotation in (None, "halves"))
    monkeypatch.setattr(codec_trials, "CODING_CASES", cases)
    coded, raw = RangeCase(cases[1], 7, 60), RangeCase(cases[0], 3, 44, is_raw=True)
    monkeypatch.setattr(codec_trials, "JOIN_CASES", ((coded, raw), (*[coded] * 6, raw)))
    with backends.as_on_metal():
        yield


@needs_compiler
def test_codec_uses_portable_kernels_that_passed() -> None:
    codec, run = PlanesCodec(4, some_rotation("halves", 64)), Plain()
    x = keys(2, 2, 150, 64)
    with codec_trials.as_if_tried("plain", run):
        planes = codec.encode(x, 70)
        found = np.array(codec.decode(planes, mx.float32))
    names = ["means_of_planes", "encode_planes", "decode_ranges"]
    assert [launch.text.name for launch in run.launches] == names
    np.testing.assert_allclose(found, np.array(codec.decode(planes, mx.float32)), rtol=0, atol=1e-4)
    assert np.abs(found - np.array(x)).mean() < 0.3


def test_failed_launch_falls_back_to_mlx_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: KernelLaunch) -> list[mx.array]:
        raise RuntimeError("no such device")

    codec, x = PlanesCodec(8), keys(2, 20, 64)
    with codec_trials.as_if_tried("plain", fails), caplog.at_level(logging.WARNING):
        planes = codec.encode(x)
        assert mx.abs(codec.decode(planes, mx.float32) - x).max() < 0.1
    assert caplog.text.count("no such device") == 1


def _tried(run: object) -> dict[What, Trial]:
    with codec_trials.as_if_tried("plain", run):  # pyright: ignore[reportArgumentType]
        assert codec_trials.try_now(KIND, PlanesCodec(8))
        return {what: codec_trials.trial(what, KIND, PlanesCodec(8)) for what in get_args(What)}


@needs_compiler
def test_trial_rejects_kernels_that_are_wrong_slow_or_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Plain):
        def __call__(self, launch: KernelLaunch) -> list[mx.array]:
            return [made * 1.02 if made.dtype != mx.uint32 else made for made in super().__call__(launch)]

    def fails(_: KernelLaunch) -> list[mx.array]:
        raise ValueError("cannot be compiled")

    for run, said in ((Wrong(), "is off by"), (fails, "cannot be compiled")):
        runtime().trials.clear()
        trials = _tried(run)
        assert not any(trial.is_used for trial in trials.values())
        assert all(said in str(trial) for trial in trials.values()), trials
    for times, is_used in (((2.0, 1.0), False), ((1.0, 2.0), True)):
        runtime().trials.clear()
        left = [*times, *times, *times]
        monkeypatch.setattr(codec_trials, "_milliseconds", lambda _, left=left: left.pop(0))
        trials = _tried(Plain())
        assert all(trial.is_used == is_used for trial in trials.values()), trials
        assert {entry["what"] for entry in codec_trials.report()} == {"encode", "decode", "join"}
        known = codec_trials.known_trial("encode", KIND)
        assert known is not None
        assert known.is_used == is_used
        heads = HeadKind(KIND, VectorKind(mx.float16, 64))
        chosen = {choice.operation.partition(" (")[0]: choice for choice in codec_dispatch.explain([heads])}
        for operation in ("encode keys", "decode keys"):
            assert chosen[operation].backend == ("metal" if is_used else "stock")
            assert ("own (" if is_used else "MLX (") in chosen[operation].reason
        assert chosen["encode values"].backend == "stock"  # no trial of 16 bits has run
        assert codec_dispatch.join_path(KIND)[0] == ("metal" if is_used else "stock")


def test_machine_without_metal_runs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    PlanesCodec(8).encode(keys(2, 20, 64))
    assert codec_trials.dialect() is None
    assert codec_trials.report() == []
