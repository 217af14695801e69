"""`bench kv-cache`: what it says of memory must be true, and the ranking what codecs.md found."""

from __future__ import annotations

import gc
import json

import mlx.core as mx
import pytest

from kvstrata.bench.kv_cache import CODECS, measure
from kvstrata.codecs.base import UnsupportedCodec


def test_rows_say_what_is_allocated_against_16_bits() -> None:
    gc.collect()  # what earlier tests left must not go while this one measures
    rows = {row.codec: row for row in measure(layers=4, seq_len=512, heads=8, head_dim=128)}
    assert list(rows) == list(CODECS)
    for row in rows.values():
        assert row.full_bytes == 2 * 4 * 8 * 512 * 128 * 2
        assert row.allocated_bytes == pytest.approx(row.nbytes, rel=0.02)
        assert row.ratio == pytest.approx(16 / row.bits_per_value)
        assert row.encode_s > 0
        assert row.decode_s > 0
    assert rows["raw"].ratio == 1.0
    assert rows["raw"].value_error == 0.0
    assert rows["planes:8"].ratio > rows["affine:8"].ratio
    assert rows["planes:8"].score_error < rows["affine:8"].score_error
    assert rows["planes:4"].score_error < rows["affine:4"].score_error
    json.dumps([row.as_json() for row in rows.values()])


def test_a_codec_that_does_not_fit_is_refused_before_anything_is_measured() -> None:
    before = mx.get_active_memory()
    with pytest.raises(UnsupportedCodec, match="head_dim 80"):
        measure(layers=1, seq_len=16, heads=2, head_dim=80, codecs=("planes:8", "affine:8"))
    assert mx.get_active_memory() <= before
