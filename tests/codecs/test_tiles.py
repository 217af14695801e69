"""Encoding and decoding in tiles, as a Mac does it: the same planes, and scratch that is bounded."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx
import pytest

from kvstrata.codecs import base
from kvstrata.codecs.mean_runs import runs_of, spread, sums
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.registry import parse
from tests.codecs.arrays import keys, rms_error, same_bits

pytestmark = pytest.mark.usefixtures("as_on_metal")

PRECISIONS = ("planes:8", "planes:4", "planes:2", "affine:4")
MOST = 3.0  # times what is read and written


@pytest.mark.parametrize("position", [0, 100, 255])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tiles_encode_and_decode_as_one_piece(precision: str, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, x = parse(precision), keys(2, 3000, 64, dtype=mx.bfloat16)
    tiled = codec.encode(x, position)
    decoded = codec.decode(tiled, mx.bfloat16)
    monkeypatch.setattr(base, "MOST_TILES", 1)
    whole = codec.encode(x, position)
    assert tiled.mean_runs == whole.mean_runs
    assert all(same_bits(tiled.arrays[name], whole.arrays[name]) for name in whole.arrays)
    assert same_bits(decoded, codec.decode(whole, mx.bfloat16))


@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize("num_tokens", [2048, 16384])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_scratch_is_bounded(precision: str, num_tokens: int) -> None:
    codec, x = parse(precision), keys(4, num_tokens, 128, dtype=mx.bfloat16)
    planes = codec.encode(x)
    moved = x.nbytes + planes.nbytes
    assert _peak(lambda: codec.encode(x)) <= MOST * moved
    assert _peak(lambda: mx.eval(codec.decode(planes, mx.bfloat16))) <= MOST * moved


def _peak(act: Callable[[], object]) -> int:
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    act()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize(
    "segments", [(7,), (256, 256), (100, 256, 256, 3), (256, 44, 212, 256, 9), (1, 1, 1), (3, 256)], ids=str
)
def test_sums_and_spread_follow_mean_runs(segments: tuple[int, ...]) -> None:
    p = mx.random.normal((2, 3, sum(segments)), key=mx.random.key(1))
    bounds = [sum(segments[:i]) for i in range(len(segments) + 1)]
    wanted = mx.stack([p[..., a:b].sum(axis=-1) for a, b in pairwise(bounds)], axis=-1)
    assert rms_error(sums(p, segments), wanted) < 1e-6
    spreaded = mx.broadcast_to(spread(wanted, segments, axis=-1), p.shape)
    assert all(bool((spreaded[..., a] == wanted[..., i]).all()) for i, a in enumerate(bounds[:-1]))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_view_reads_as_a_cut(bits: int) -> None:
    codec = PlanesCodec(bits)
    first = codec.encode(keys(2, 300, 64), position=40)
    planes = codec.join(first, codec.encode(keys(2, 500, 64, seed=1), position=340))
    q = mx.random.normal((2, 3, 64), key=mx.random.key(1))
    for start, end in ((0, 800), (10, 700), (299, 301), (512, 513)):
        view, cut = planes.view(start, end), planes.cut(start, end)
        assert view.mean_runs == cut.mean_runs
        assert rms_error(codec.scores(q, view), codec.scores(q, cut)) < 1e-6
        p = mx.softmax(codec.scores(q, cut), axis=-1)
        assert rms_error(codec.mix(p, view), codec.mix(p, cut)) < 1e-6
        assert rms_error(codec.decode(view, mx.float32), codec.decode(cut, mx.float32)) < 1e-6


def test_mean_runs_of_a_long_prompt_are_regular() -> None:
    assert runs_of(100, 700) == (156, 256, 256, 32)
