"""What a step of the engine asks of the store costs the same with few entries and with many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvstrata.store.options import LadderOptions
from kvstrata.store.stock import Stock
from tests.store.disk import store_on
from tests.store.kv import settle, store_tokens

FEW, MANY = 10, 300


def _filled(stock: Stock, num_entries: int) -> None:
    """All of them refused by a disk whose daily budget is spent, and as low as they may go."""
    for number in range(num_entries):
        store_tokens(stock, [10 * number + at for at in range(8)])
    settle(stock)
    stock.pressure.make_room(1 << 40)
    settle(stock)
    stock.spills.add_free()
    settle(stock)
    stock.spills.add_free()  # that they were refused has been seen


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
        ladder = LadderOptions(by_pressure=True)
        with store_on(tmp_path / str(num_entries), ladder=ladder, daily_write_bytes=1) as stock:
            _filled(stock, num_entries)
            assert stock.counters["refused_spills"] >= num_entries
            held_bytes = stock.shelf.held_bytes
            costs[num_entries] = {
                "spilling ahead": _seconds(lambda s=stock, b=held_bytes: s.spills.add_some(b, b)),
                "stepping down": _seconds(lambda s=stock, b=held_bytes: s.pressure.make_room(b)),
                "usage": _seconds(stock.reporter.usage),
            }
    for what, few_s in costs[FEW].items():
        # In proportion it would be 30 times as much.
        assert costs[MANY][what] < 8 * few_s + 200e-6, what
