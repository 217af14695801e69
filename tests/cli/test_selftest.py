"""What `kvstrata doctor --report` tries: right here, and right as a Mac runs it."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from kvstrata.attention import segments
from kvstrata.cli import app, selftest
from kvstrata.codecs import backends, raw


def failed() -> list[selftest.Check]:
    return [check for check in selftest.checks() if not check.passed]


def test_everything_is_right_here() -> None:
    assert failed() == []


def test_everything_is_right_as_a_mac_runs_it() -> None:
    with backends.as_on_metal():
        assert failed() == []


def test_scores_that_are_rounded_to_16_bits_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(q: mx.array, k: mx.array, scale: float = 1.0) -> mx.array:
        return ((q * scale) @ k.swapaxes(-1, -2)).astype(mx.float32)

    for module in (raw, segments, selftest):
        monkeypatch.setattr(module, "exact_scores", rounded)
    with backends.as_on_metal():
        found = {check.what for check in failed()}
    for what in (
        "16-bit scores",
        "attention over raw",
        "attention over a cut of raw",
        "attention beside one new token",
    ):
        assert f"{what}, bfloat16" in found


def test_a_report_says_what_fails_and_hides_whose_machine_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = selftest.Check("attention over raw", 0.3, 0.01)
    monkeypatch.setattr(selftest, "checks", lambda: [broken, selftest.Check("copies", 0.0, 0.1)])
    monkeypatch.setattr(selftest, "_copy_timing", _no_such_operation)
    monkeypatch.setattr(selftest, "TIMED_TOKENS", 64)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["doctor", "--report", str(file), "--json"])
    assert result.exit_code == 1
    told = json.loads(file.read_text())
    assert [check["passed"] for check in told["checks"]] == [False, True]
    assert any("attention over raw" in finding["what"] for finding in told["findings"])
    assert told["timings"][0]["reason"] == "RuntimeError: no such operation"
    assert len(told["timings"]) > 10
    assert told["kernels"]["path"] == backends.runtime().backend
    assert str(tmp_path) not in file.read_text()


def _no_such_operation() -> list[selftest.Timing]:
    raise RuntimeError("no such operation")


def test_a_report_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--report", str(tmp_path / "missing" / "report.json")])
    assert result.exit_code != 0
    assert "cannot be written" in str(result.exception or result.output)
