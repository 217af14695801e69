"""Concurrent changes of precision: scope, progress and cancellation."""

from __future__ import annotations

from kvstrata.codecs.registry import parse
from kvstrata.prefix_cache.requantize import NO_MEMORY, PrecisionChange
from kvstrata.prefix_cache.usage import share_of
from tests.engine.drive import Drive
from tests.engine.test_loop import prompt
from tests.engine.test_requantize import settle
from tests.support.models import tiny_loaded


def drive_with(salts: list[str]) -> Drive:
    """Return an engine with one cached conversation under each salt."""
    drive = Drive(tiny_loaded("llama"))
    for seed, salt in enumerate(salts):
        drive.submit(prompt(600, seed=seed), 4, salt=salt)
        drive.run()
    settle(drive)
    return drive


def precisions(drive: Drive) -> list[tuple[str, set[str]]]:
    return [(entry.salt, set(share_of(entry).by_precision)) for entry in drive.prefix_cache.table.entries]


def target(drive: Drive) -> str:
    return drive.prefix_cache.requantizer.target.k.name


def test_scoped_change_leaves_general_target() -> None:
    drive = drive_with(["", "x", ""])
    drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
    drive.cache.requantize(PrecisionChange(parse("planes:4"), parse("planes:4"), salt="x"))
    assert target(drive) == "planes:8"
    progress = drive.cache.requantize_progress()
    assert (progress.spans_total, progress.is_running) == (3, True)
    settle(drive)
    assert sorted(precisions(drive)) == [("", {"planes:8"}), ("", {"planes:8"}), ("x", {"planes:4"})]
    progress = drive.cache.requantize_progress()
    assert (progress.spans_total, progress.spans_done, progress.is_running) == (3, 3, False)
    # New tokens get the general target under any salt.
    drive.submit(prompt(600, seed=9), 4, salt="x")
    drive.run()
    settle(drive)
    assert precisions(drive)[-1] == ("x", {"planes:8"})


def test_freed_bytes_of_overlapping_changes_count_from_before_the_first() -> None:
    drive = drive_with(["", "x"])
    before = drive.prefix_cache.table.nbytes
    drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
    drive.core.pacer.run_slice(0)
    drive.cache.requantize(PrecisionChange(parse("planes:4"), parse("planes:4"), salt="x"))
    settle(drive)
    assert drive.cache.requantize_progress().bytes_freed == before - drive.prefix_cache.table.nbytes


def test_last_general_change_wins() -> None:
    drive = drive_with(["", "x"])
    drive.cache.requantize(PrecisionChange(parse("planes:2"), parse("planes:2"), salt="x"))
    drive.cache.requantize(PrecisionChange(parse("planes:4"), parse("planes:4")))
    drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
    assert target(drive) == "planes:8"
    settle(drive)
    assert [held for _, held in precisions(drive)] == [{"planes:8"}, {"planes:8"}]
    assert drive.cache.requantize_progress().spans_total == 2


def test_cancel_ends_running_changes_and_restores_earlier_target() -> None:
    drive = drive_with(["", "x", ""])
    drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
    drive.cache.requantize(PrecisionChange(parse("planes:4"), parse("planes:4")))
    drive.cache.requantize(PrecisionChange(parse("planes:2"), parse("planes:2"), salt="x"))
    ended = drive.cache.cancel_requantize()
    assert (ended.spans_total, ended.spans_done, ended.is_running) == (3, 0, True)
    settle(drive)
    assert target(drive) == "raw"
    assert all(held == {"raw"} for _, held in precisions(drive))


def test_cancel_leaves_target_of_finished_change() -> None:
    drive = drive_with(["", "x"])
    drive.cache.requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
    settle(drive)
    drive.cache.requantize(PrecisionChange(parse("planes:4"), parse("planes:4"), salt="x"))
    assert drive.cache.cancel_requantize().spans_total == 1
    settle(drive)
    assert target(drive) == "planes:8"
    assert all(held == {"planes:8"} for _, held in precisions(drive))


def test_raising_precision_stays_within_memory_and_reports_the_rest() -> None:
    drive = drive_with([str(seed) for seed in range(4)])
    drive.cache.requantize(PrecisionChange(parse("planes:4"), parse("planes:4")))
    settle(drive)
    held = drive.prefix_cache.table.nbytes
    grows = max(entry.nbytes for entry in drive.prefix_cache.table.entries) * 8  # float32 from 4 bits
    drive.prefix_cache.reclaimer.limit_bytes = held + 2 * grows
    up = PrecisionChange(parse("raw"), parse("raw"), force=True)
    estimated = drive.cache.requantize(PrecisionChange(parse("raw"), parse("raw"), force=True, dry_run=True))
    (left,) = [left for left in estimated.left_alone if left.reason == NO_MEMORY]
    assert 0 < left.spans < 4
    done = drive.cache.requantize(up)
    assert done.bytes_after == estimated.bytes_after
    limit = drive.prefix_cache.reclaimer.limit_bytes
    settle(drive)
    assert drive.prefix_cache.table.nbytes == estimated.bytes_after <= limit
    assert len(drive.prefix_cache.table.entries) == 4
    # The memory went to the entries that were used last.
    assert [precisions(drive)[i][1] for i in (0, 3)] == [{"planes:4"}, {"raw"}]
