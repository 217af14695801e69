"""Cost of the prefix cache in each step of the engine: independent of the number of entries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.kv.precision_plan import make_plan
from kvstrata.prefix_cache import requantize
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.requantize import PrecisionChange
from tests.prefix_cache.disk import store_on
from tests.prefix_cache.kv import LAYOUT, new_cache, settle, store_tokens

FEW, MANY = 10, 300


def _filled(cache: PrefixCache, num_entries: int) -> None:
    """Fill a cache with entries at their lowest precision. The disk has refused all: its daily budget is spent."""
    for number in range(num_entries):
        store_tokens(cache, [10 * number + at for at in range(8)])
    settle(cache)
    cache.reclaimer.step_down(1 << 40)
    settle(cache)
    cache.offloader.offer_changed()
    settle(cache)
    cache.offloader.offer_changed()  # takes the refused entries from the dirty set


def _seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(9):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def test_step_with_many_entries_costs_as_much_as_with_few(tmp_path: Path) -> None:
    costs: dict[int, dict[str, float]] = {}
    for num_entries in (FEW, MANY):
        with store_on(tmp_path / str(num_entries), dynamic=True, daily_write_bytes=1) as cache:
            _filled(cache, num_entries)
            assert cache.counters["refused_spills"] >= num_entries
            held_bytes = cache.table.nbytes
            costs[num_entries] = {
                "offload ahead of need": _seconds(lambda s=cache, b=held_bytes: s.offloader.offer_under_pressure(b, b)),
                "step down": _seconds(lambda s=cache, b=held_bytes: s.reclaimer.step_down(b)),
                "usage": _seconds(cache.usage.usage),
            }
    for operation, few_s in costs[FEW].items():
        # In proportion it would be 30 times as much.
        assert costs[MANY][operation] < 8 * few_s + 200e-6, operation


def test_progress_of_a_change_counts_only_changed_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache("raw", min_quantize_tokens=0)
    for number in range(MANY // 10):
        store_tokens(cache, [10 * number + at for at in range(8)])
    settle(cache)
    held_bytes = cache.table.nbytes
    cache.requantizer.requantize(PrecisionChange(), make_plan(LAYOUT, parse("planes:8"), parse("planes:8")))
    counted_entries: list[Entry] = []

    def counted(entry: Entry) -> int:
        counted_entries.append(entry)
        return entry.nbytes

    monkeypatch.setattr(requantize, "counted_bytes", counted)
    cache.requantizer.progress()
    counted_entries.clear()
    cache.run_background(0)
    assert cache.requantizer.progress().is_running
    assert len(set(counted_entries)) <= 1
    settle(cache)
    progress = cache.requantizer.progress()
    assert (progress.spans_total, progress.spans_done) == (MANY // 10, MANY // 10)
    assert progress.bytes_freed == held_bytes - cache.table.nbytes > 0
    counted_entries.clear()
    cache.evictor.evict_leaf(cache.lookup(range(8), "").path[-1], 0)
    assert cache.requantizer.progress().spans_total == MANY // 10
    assert not counted_entries


def test_dry_run_assesses_one_entry_in_each_step() -> None:
    cache = new_cache("raw", min_quantize_tokens=0)
    for number in range(20):
        store_tokens(cache, [10 * number + at for at in range(8)])
    settle(cache)
    plan = make_plan(LAYOUT, parse("planes:8"), parse("planes:8"))
    steps = cache.requantizer.requantize_in_steps(PrecisionChange(dry_run=True), plan)
    for _ in range(5):
        next(steps)
    cache.evictor.evict_to(cache.table.nbytes // 2)  # other work runs between the steps
    assert sum(1 for _ in steps) >= 15
    assert cache.requantizer.requantize(PrecisionChange(dry_run=True), plan).spans == len(cache.table.entries) < 20
