"""Changes of precision in the engine while sequences run."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from kvstrata.codecs.registry import parse
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.errors import ConfigError, InvalidRequest
from kvstrata.kv.precision_estimate import LOWER
from kvstrata.prefix_cache.requantize import RECURRENT, PrecisionChange
from tests.engine.drive import Drive
from tests.engine.test_loop import prompt
from tests.support.models import tiny_loaded


def settle(drive: Drive) -> None:
    while drive.core.pacer.has_work:
        drive.core.pacer.run_slice(1.0)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_dry_run_reports_bytes_that_change_frees(architecture: str) -> None:
    drive = Drive(tiny_loaded(architecture))
    drive.submit(prompt(700), 20)
    drive.run()
    settle(drive)
    before = drive.prefix_cache.table.nbytes
    estimated = drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:4"), dry_run=True))
    assert drive.prefix_cache.table.nbytes == before
    assert (estimated.k, estimated.v, estimated.dry_run) == ("planes:8", "planes:4", True)
    assert 0 < estimated.expected_error < 0.1
    done = drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:4")))
    settle(drive)
    freed = before - drive.prefix_cache.table.nbytes
    assert freed == estimated.tiers["hot"].bytes_freed == done.bytes_before - done.bytes_after
    assert set(estimated.tiers) == {"hot"}
    reasons = {RECURRENT} if architecture == "qwen3_next" else set()
    assert {left.reason for left in estimated.left_alone} == reasons
    assert drive.cache.requantize_progress().bytes_freed == freed


def test_raising_precision_leaves_lower_spans_and_reports_them() -> None:
    drive = Drive(tiny_loaded("llama"), storage=KvConfig(k=parse("planes:4"), v=parse("planes:4")))
    drive.submit(prompt(700), 20)
    drive.run()
    settle(drive)
    before = drive.prefix_cache.table.nbytes
    estimated = drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
    settle(drive)
    assert drive.prefix_cache.table.nbytes == before
    assert estimated.spans == 0
    assert [left.reason for left in estimated.left_alone] == [LOWER]
    # New tokens get the new target.
    drive.submit(prompt(700, seed=9), 20)
    drive.run()
    settle(drive)
    assert set(drive.prefix_cache.usage.usage().by_precision) == {"planes:4", "planes:8"}
    drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8"), force=True))
    settle(drive)
    assert set(drive.prefix_cache.usage.usage().by_precision) == {"planes:8"}


def test_running_sequences_change_and_finish() -> None:
    drive = Drive(tiny_loaded("llama"), EngineLimits(buffer_step_tokens=1000))
    clients = [drive.submit(prompt(500 + i, seed=i), 120) for i in range(4)]
    while not all(len(client.ids) > 20 for client in clients):
        drive.core.executor.step()
    before = drive.cache.usage().running_bytes
    estimated = drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8"), scope="live"))
    settle(drive)
    freed = before - drive.cache.usage().running_bytes
    assert freed == pytest.approx(estimated.bytes_before - estimated.bytes_after, rel=0.01)
    assert freed > 0
    # The second change takes sealed tokens down under their owner.
    before = drive.cache.usage().running_bytes
    estimated = drive.cache.requantize(PrecisionChange(parse("planes:4"), parse("planes:4"), scope="live"))
    settle(drive)
    freed = before - drive.cache.usage().running_bytes
    assert freed == pytest.approx(estimated.bytes_before - estimated.bytes_after, rel=0.01)
    assert freed > 0
    parts = {part.k for sequence in drive.cache.usage().sequences for part in sequence.parts}
    assert parts == {"raw", "planes:4"}
    drive.run()
    assert all(client.finished.usage.completion_tokens == 120 for client in clients)


def test_stepping_down_within_planes_keeps_remaining_arrays() -> None:
    drive = Drive(tiny_loaded("llama"), storage=KvConfig(k=parse("planes:8"), v=parse("planes:8")))
    drive.submit(prompt(700), 20)
    drive.run()
    settle(drive)
    (entry,) = drive.prefix_cache.table.entries
    before = {layer: entry.span.sealed(layer)[0].k.arrays for layer in entry.span.layers}
    drive.cache.requantize(PrecisionChange(parse("planes:4"), parse("planes:4")))
    settle(drive)
    for layer, arrays in before.items():
        now = entry.span.sealed(layer)[0].k.arrays
        assert set(arrays) - set(now) == {"low"}
        assert all(now[name] is arrays[name] for name in now)


def test_later_change_replaces_earlier_one_and_cancel_stops_work() -> None:
    drive = Drive(tiny_loaded("llama"))
    for i in range(6):
        drive.submit(prompt(600, seed=i), 4)
    drive.run()
    settle(drive)
    drive.cache.requantize(PrecisionChange(parse("planes:2"), parse("planes:2")))
    drive.core.pacer.run_slice(0)
    halfway = drive.cache.cancel_requantize()
    assert halfway.is_running
    assert halfway.spans_done < halfway.spans_total == 6
    settle(drive)
    assert drive.cache.requantize_progress().spans_total == 0
    drive.cache.requantize(PrecisionChange(parse("planes:2"), parse("planes:2")))
    drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
    settle(drive)
    # The cancelled change had begun one layer of one span.
    assert set(drive.prefix_cache.usage.usage().by_precision) <= {"planes:8", "planes:2"}
    assert drive.prefix_cache.usage.usage().by_precision["planes:8"] > 0
    again = drive.submit(prompt(600, seed=3), 4)
    drive.run()
    assert again.finished.usage.cached_tokens == 599


def test_cancelled_change_does_not_continue_in_running_request() -> None:
    drive = Drive(tiny_loaded("llama"))
    drive.submit(prompt(600), 4)
    drive.run()
    running = drive.submit(prompt(200, seed=9), 400)
    while len(running.ids) < 8:
        drive.core.executor.step()
    settle(drive)
    drive.cache.requantize(PrecisionChange(parse("planes:2"), parse("planes:2")))
    # The running request has too few tokens to be encoded yet.
    assert drive.cache.cancel_requantize().is_running
    while len(running.ids) < 390:
        drive.core.executor.step()
    assert {part.k for sequence in drive.cache.usage().sequences for part in sequence.parts} == {"raw"}
    drive.run()
    settle(drive)
    assert set(drive.prefix_cache.usage.usage().by_precision) == {"raw"}


def test_invalid_changes_are_refused_and_change_nothing() -> None:
    drive = Drive(tiny_loaded("llama"))
    drive.submit(prompt(600), 4)
    drive.run()
    settle(drive)
    before = drive.prefix_cache.usage.usage()
    with pytest.raises(ConfigError, match="planes"):
        drive.cache.requantize(PrecisionChange(parse("plains:8"), parse("planes:8")))
    with pytest.raises(InvalidRequest, match="No request"):
        drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8"), sequence="nobody"))
    nothing = drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8"), salt="nobody's"))
    assert (nothing.spans, nothing.bytes_before) == (0, 0)
    assert drive.prefix_cache.usage.usage() == before


@pytest.mark.usefixtures("exact_buffers")
def test_reported_bytes_are_free_before_next_step_of_readers() -> None:
    drive = Drive(tiny_loaded("llama", 4))
    drive.submit(prompt(1500), 4)
    drive.run()
    settle(drive)
    readers = [drive.submit([*prompt(1500), 5 + i], 100) for i in range(2)]
    while not all(len(reader.ids) > 3 for reader in readers):
        drive.core.executor.step()

    def held() -> tuple[int, int]:
        mx.synchronize()
        usage = drive.cache.usage()
        return usage.running_bytes + usage.tiers["hot"].nbytes, mx.get_active_memory()

    gc.collect()
    for name in ("planes:8", "planes:4"):
        counted_before, active_before = held()
        drive.cache.requantize(PrecisionChange(parse(name), parse(name)))
        settle(drive)
        counted, active = held()
        assert counted_before - counted > 100_000
        assert active_before - active == pytest.approx(counted_before - counted, rel=0.02)
    drive.run()
    assert all(reader.finished.usage.cached_tokens == 1500 for reader in readers)
