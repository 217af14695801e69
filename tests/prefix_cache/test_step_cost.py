"""What a step of the engine asks of the store costs the same with few entries and with many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.prefix_cache import requantize
from kvstrata.prefix_cache.config import LadderConfig
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.prefix_cache import Stock
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.spans.plan import make_plan
from tests.prefix_cache.disk import store_on
from tests.prefix_cache.kv import LAYOUT, new_stock, settle, store_tokens

FEW, MANY = 10, 300


def _filled(stock: Stock, num_entries: int) -> None:
    """All of them refused by a disk whose daily budget is spent, and as low as they may go."""
    for number in range(num_entries):
        store_tokens(stock, [10 * number + at for at in range(8)])
    settle(stock)
    stock.reclaimer.step_down(1 << 40)
    settle(stock)
    stock.offloader.offer_changed()
    settle(stock)
    stock.offloader.offer_changed()  # that they were refused has been seen


def _seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(9):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def test_a_step_costs_the_same_however_many_entries_there_are(tmp_path: Path) -> None:
    costs: dict[int, dict[str, float]] = {}
    for num_entries in (FEW, MANY):
        ladder = LadderConfig(by_pressure=True)
        with store_on(tmp_path / str(num_entries), ladder=ladder, daily_write_bytes=1) as stock:
            _filled(stock, num_entries)
            assert stock.counters["refused_spills"] >= num_entries
            held_bytes = stock.table.nbytes
            costs[num_entries] = {
                "spilling ahead": _seconds(lambda s=stock, b=held_bytes: s.offloader.offer_under_pressure(b, b)),
                "stepping down": _seconds(lambda s=stock, b=held_bytes: s.reclaimer.step_down(b)),
                "usage": _seconds(stock.usage.usage),
            }
    for what, few_s in costs[FEW].items():
        # In proportion it would be 30 times as much.
        assert costs[MANY][what] < 8 * few_s + 200e-6, what


def test_progress_of_a_change_looks_only_at_spans_that_changed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = new_stock("raw", min_quantize_tokens=0)
    for number in range(MANY // 10):
        store_tokens(stock, [10 * number + at for at in range(8)])
    settle(stock)
    held_bytes = stock.table.nbytes
    stock.requantizer.requantize(PrecisionChange(), make_plan(LAYOUT, parse("planes:8"), parse("planes:8")))
    looked_at: list[Entry] = []

    def counted(entry: Entry) -> int:
        looked_at.append(entry)
        return entry.nbytes

    monkeypatch.setattr(requantize, "counted_bytes", counted)
    stock.requantizer.progress()
    looked_at.clear()
    stock.background.run_background(0)
    assert stock.requantizer.progress().is_running
    assert len(set(looked_at)) <= 1
    settle(stock)
    progress = stock.requantizer.progress()
    assert (progress.spans_total, progress.spans_done) == (MANY // 10, MANY // 10)
    assert progress.bytes_freed == held_bytes - stock.table.nbytes > 0
    looked_at.clear()
    stock.evictor.evict_leaf(stock.store.lookup(range(8), "").path[-1], 0)
    assert stock.requantizer.progress().spans_total == MANY // 10
    assert not looked_at


def test_a_dry_run_looks_at_one_entry_in_each_step() -> None:
    stock = new_stock("raw", min_quantize_tokens=0)
    for number in range(20):
        store_tokens(stock, [10 * number + at for at in range(8)])
    settle(stock)
    plan = make_plan(LAYOUT, parse("planes:8"), parse("planes:8"))
    steps = stock.requantizer.requantize_in_steps(PrecisionChange(dry_run=True), plan)
    for _ in range(5):
        next(steps)
    stock.evictor.shrink_to(stock.table.nbytes // 2)  # others go on between the steps
    assert sum(1 for _ in steps) >= 15
    assert stock.requantizer.requantize(PrecisionChange(dry_run=True), plan).spans == len(stock.table.entries) < 20
