"""Decoding over a long context, on a tiny model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks import decode
from tests.support.models import tiny_loaded

pytestmark = pytest.mark.slow


def test_command_prints_a_row_for_each_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "load_model", lambda *_, **__: tiny_loaded("llama"))
    options = ["--context-tokens", "256", "--reply-tokens", "2", "--rounds", "1", "--precisions", "raw,planes:8"]
    result = CliRunner().invoke(decode.app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)) == 2 + 1 + len(decode.QUANTIZED_BITS)
