"""Rates of codecs: what is counted, and that every codec is there."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from benchmarks import codecs
from benchmarks.codecs import CODECS, DIM, KV_HEADS, measure, table
from kvstrata.codecs.registry import parse_for

pytestmark = pytest.mark.slow


def test_each_codec_is_beside_a_copy_with_the_bytes_that_it_moves() -> None:
    figures = measure(64, 1, mx.bfloat16)

    rates = {rate.what: rate for rate in figures.rates}
    assert list(rates) == ["copy", *(f"{name}, {what}" for name in CODECS for what in ("encode", "decode"))]
    assert rates["copy"].of_copy == 1
    raw = 2 * KV_HEADS * 64 * DIM
    for name, rate in rates.items():
        moved = rate.gigabytes_s * rate.microseconds * 1e3
        if name == "copy":
            expected = 2 * raw
        else:
            x = mx.zeros((KV_HEADS, 64, DIM), mx.bfloat16)
            expected = raw + parse_for(name.split(",")[0], DIM).encode(x).nbytes
        assert moved == pytest.approx(expected)
    assert "planes:8, encode" in table(figures)


def test_command_prints_json() -> None:
    result = CliRunner().invoke(codecs.app, ["--tokens", "64", "--rounds", "1", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rates"][0]["what"] == "copy"
