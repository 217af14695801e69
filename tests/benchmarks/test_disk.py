"""Speed of the disk tier beside a plain file, and bytes that traces write."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import disk
from kvstrata.bench.trace import BLOCK_TOKENS, ReplayRequest, ReplayTrace, sessions, trace_of
from kvstrata.errors import KvstrataError
from kvstrata.tiers.interface import Refusal, Refused

pytestmark = pytest.mark.slow


def trace_of_blocks(prompts: list[list[int]]) -> ReplayTrace:
    return trace_of("t", [ReplayRequest(float(at), np.array(ids, dtype=np.int32)) for at, ids in enumerate(prompts)])


def test_blocks_are_compared_with_a_plain_file_round_by_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = iter([disk.DiskTimes(2.0, 1.0), disk.DiskTimes(8.0, 4.0), disk.DiskTimes(4.0, 2.0)])
    plain = iter([disk.DiskTimes(1.0, 1.0), disk.DiskTimes(2.0, 1.0), disk.DiskTimes(3.0, 1.0)])
    monkeypatch.setattr(disk, "_through_tier", lambda *_: next(ours))
    monkeypatch.setattr(disk, "_as_file", lambda *_: next(plain))
    write, read = disk.measure(tmp_path, num_blocks=4, block_bytes=1_000_000, rounds=3).rates
    assert write == disk.DiskRate("write", 1.0, 2.0, 0.5)
    assert read == disk.DiskRate("read", 2.0, 4.0, 0.5)


def test_blocks_and_a_file_are_written_and_read(tmp_path: Path) -> None:
    figures = disk.measure(tmp_path, num_blocks=3, block_bytes=4096, rounds=1)
    assert all(rate.blocks_mb_s > 0 and rate.file_mb_s > 0 for rate in figures.rates)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert "3 blocks of" in disk.table(figures)


def test_a_disk_that_takes_no_block_gives_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.DiskTier, "put", lambda *_, **__: Refused(Refusal.PAUSED))
    with pytest.raises(KvstrataError, match="did not take a block: paused"):
        disk.measure(tmp_path, num_blocks=1, block_bytes=64, rounds=1)


def test_a_block_that_does_not_come_back_gives_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(files: Iterable[Path]) -> None:
        next(iter(files)).unlink()

    monkeypatch.setattr(disk, "leave_page_cache", lose)
    with pytest.raises(KvstrataError, match="not all came back from the disk cache: "):
        disk.measure(tmp_path, num_blocks=2, block_bytes=4096, rounds=1)


def test_size_without_bytes_is_refused() -> None:
    result = CliRunner().invoke(disk.app, ["rates", "--block-size", "20%"])
    assert result.exit_code
    assert "20% is not a number of bytes" in result.output


def test_sessions_are_recognized_by_prompts_that_continue() -> None:
    # All begin with the same system prompt (7). The last block of a prompt may be a part of one.
    prompts = [
        ([7, 1, 2], 3),
        ([7, 5, 6], 3),
        ([7, 1, 2, 3, 8], 4.5),
        ([7, 1, 2, 3, 9], 5),
        ([7, 30], 1.5),
        ([7, 31], 2),
    ]
    asked = [
        ReplayRequest(float(at), np.array(ids, dtype=np.int32), int(num_blocks * BLOCK_TOKENS))
        for at, (ids, num_blocks) in enumerate(prompts)
    ]
    assert sessions(trace_of("t", asked)) == (0, 1, 0, 0, 2, 3)


def test_writes_of_a_session_that_grows_are_bounded() -> None:
    """Two turns of 1,000 and 1,300 tokens with replies of 100: the second has the first, and maybe its reply."""
    first, second = np.array([1, 2], dtype=np.int32), np.array([1, 3, 4], dtype=np.int32)
    trace = trace_of("t", [ReplayRequest(0.0, first, 1000, 100), ReplayRequest(3600.0, second, 1300, 100)])
    (row,) = disk.measure_writes(trace, [4 * 512], token_bytes=1)
    assert (row.least_bytes, row.most_bytes) == (1400, 1000 + 100 + 1300 - 512 + 100)
    assert row.a_day(row.least_bytes) == 24 * 1400
    assert row.evicted_bytes == 0


def test_writes_at_eviction_count_each_block_once() -> None:
    trace = trace_of_blocks([[1, 2], [3, 4], [1, 2], [3, 4]])
    (row,) = disk.measure_writes(trace, [2 * 512], token_bytes=1)
    assert row.evicted_bytes == 4 * 512


def test_commands_print_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(disk.app, ["writes", "--made-up", "20", "--budgets", "1MiB,10%", "--json"])
    assert result.exit_code == 0, result.output
    assert [row["trace"] for row in json.loads(result.stdout)] == ["made-up-20"] * 2
    rates = ["rates", "--directory", str(tmp_path), "--blocks", "2", "--block-size", "64KiB", "--rounds", "1", "--json"]
    result = CliRunner().invoke(disk.app, rates)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["block_bytes"] == 64 << 10
