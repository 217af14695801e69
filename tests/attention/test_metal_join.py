"""Prompt chunks over segments on Metal: one launch joins the keys and one the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import mlx.core as mx
import pytest

from kvstrata.attention.dispatch import attend
from kvstrata.attention.segments import Segment, SegmentedKV, SegmentSlice
from kvstrata.codecs import backends, trials
from kvstrata.codecs.backends import Trial, TrialKey, VectorKind, runtime
from kvstrata.codecs.metal import planes as metal_planes
from kvstrata.codecs.metal.planes import TokenRange
from kvstrata.codecs.trials import What
from tests.attention.plain_kernels import Plain
from tests.attention.test_metal_decode import KV_HEADS, needs_compiler, raw, sealed
from tests.codecs.arrays import keys

DIM, GROUP, CHUNK = 64, 2, 9


@pytest.fixture(autouse=True)
def as_on_metal() -> Iterator[None]:
    with backends.as_on_metal():
        yield


def chat() -> tuple[Segment, ...]:
    """Return cached segments of several turns, one of them a slice, and the sequence's own raw tokens."""
    turns = [
        SegmentSlice(sealed("planes:8 halves", "planes:4", 300, DIM), 0, 280),
        sealed("planes:4 halves", "planes:2", 120, DIM, seed=2, position=280),
        sealed("raw", "planes:8", 40, DIM, seed=4, position=400),
    ]
    return (*turns, raw(20 + CHUNK, DIM, 7, start=0))


def attended(parts: tuple[Segment, ...]) -> mx.array:
    q = keys(1, KV_HEADS * GROUP, CHUNK, DIM, seed=9) * 0.15
    held = SegmentedKV((parts,))
    return attend(q, held, held, None, DIM**-0.5, "causal")


@needs_compiler
def test_chunk_joins_all_segments_in_one_launch_for_keys_and_one_for_values() -> None:
    parts, run = chat(), Plain()
    wanted = attended(parts)
    with trials.as_if_tried("plain", run):
        found = attended(parts)
    assert [launch.text.name for launch in run.launches] == ["decode_ranges"] * 2
    assert mx.abs(found - wanted).max() < 1e-4 * mx.abs(wanted).max()


@needs_compiler
def test_raw_segments_and_other_codecs_are_left_to_mlx() -> None:
    run = Plain()
    own, values = raw(20 + CHUNK, DIM, 7, start=0), sealed("raw", "planes:8", 40, DIM)
    with trials.as_if_tried("plain", run):
        for parts in ((own,), (sealed("raw", "raw", 40, DIM), own), (sealed("affine:8", "affine:8", 40, DIM), own)):
            attended(parts)
        assert not run.launches
        attended((values, own))
    assert len(run.launches) == 1  # keys that are not coded need none


@needs_compiler
def test_join_is_used_only_after_an_accepting_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine the kernel is right and faster, on the other it is not."""
    parts, asked = chat(), []
    wanted = attended(parts)
    kind = VectorKind(mx.float32, DIM)

    join = metal_planes.join

    def joined(stretches: Sequence[TokenRange], dtype: mx.Dtype, *_: object) -> mx.array:
        asked.append(len(stretches))
        return join(stretches, dtype, "plain", Plain())

    monkeypatch.setattr(trials, "dialect", lambda: "metal")
    monkeypatch.setattr(metal_planes, "join", joined)
    slow = {TrialKey(what, kind): Trial(what, 0.0, 1.0, 2.0, 1.0) for what in get_args(What)}
    monkeypatch.setattr(runtime(), "trials", slow)
    assert mx.array_equal(attended(parts), wanted)
    assert not asked
    faster = Trial("join", 0.0, 1.0, 1.0, 2.0)
    monkeypatch.setattr(runtime(), "trials", {**slow, TrialKey("join", kind): faster})
    assert mx.abs(attended(parts) - wanted).max() < 1e-4 * mx.abs(wanted).max()
    assert asked == [4, 4]
