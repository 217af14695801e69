"""The index and the LRU order of its leaves, against plain lists of the same records."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.tiers.block import BASE, BlockId
from kvstrata.tiers.disk.index import (
    LARGEST_REST,
    BlockIndex,
    BlockRecord,
    ClearMarker,
    IndexTotals,
    LruLeaves,
    RunningTotals,
    write_labels,
)
from kvstrata.tiers.interface import RemovalCause
from tests.tiers.disk.blocks import OTHER_ROOT, ROOT


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def make_record(
    number: int,
    parent: BlockRecord | None = None,
    *,
    root: bytes = ROOT,
    last_use: float = 0.0,
    part: str = BASE,
    tokens: int = 1,
) -> BlockRecord:
    above, start = (root, 0) if parent is None else (parent.id.key, parent.start + parent.num_tokens)
    labels = write_labels({"codec:raw": 100 + tokens})
    return BlockRecord(BlockId(key_of(number), part), above, root, start, tokens, 4096, last_use, 0, 0.0, labels)


def random_records(generator: np.random.Generator, size: int) -> list[BlockRecord]:
    """Return trees of bases, some with another part."""
    rows: list[BlockRecord] = []
    for index in range(size):
        above = int(generator.integers(-1, index)) if index else -1
        parent = rows[above] if above >= 0 else None
        rows.append(make_record(index + 1, parent, last_use=float(generator.integers(12))))
    extras = [
        replace(row, id=BlockId(row.id.key, "mark"), last_use=float(generator.integers(12)))
        for row in rows
        if generator.random() < 0.3
    ]
    return rows + extras


def leaves_of(rows: list[BlockRecord]) -> list[BlockRecord]:
    """Return the records that can be removed without breaking a chain, oldest first."""

    def is_leaf(row: BlockRecord) -> bool:
        if row.id.part != BASE:
            return True
        hang_on_it = (o for o in rows if o.parent == row.id.key or (o.id.key == row.id.key and o.id.part != BASE))
        return not any(hang_on_it)

    return sorted(filter(is_leaf, rows), key=lambda row: (row.last_use, -row.start))


def add_all(index: BlockIndex, rows: list[BlockRecord]) -> None:
    for row in rows:
        index.add(row)


def index_of(rows: list[BlockRecord]) -> tuple[BlockIndex, LruLeaves]:
    index = BlockIndex()
    add_all(index, rows)
    return index, index.leaves


def forget(index: BlockIndex, rows: list[BlockRecord]) -> None:
    index.forget(rows, RemovalCause.EVICTED)


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 12))
def test_lru_leaves_yield_the_oldest_unpinned_leaf(seed: int, size: int, num_pinned: int) -> None:
    generator = np.random.default_rng(seed)
    rows = random_records(generator, size)
    pinned = {rows[int(number)].id.key for number in generator.integers(0, size, num_pinned)}
    index, order = index_of(rows)
    with closing(order.oldest(pinned.__contains__)) as victims:
        for victim in victims:
            allowed = [row for row in leaves_of(rows) if row.id.key not in pinned]
            assert (victim.last_use, -victim.start) == (allowed[0].last_use, -allowed[0].start)
            assert victim in allowed
            rows.remove(victim)
            forget(index, [victim])
    assert all(row.id.key in pinned for row in leaves_of(rows))
    assert sorted(index.records(), key=str) == sorted(rows, key=str)


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_lru_leaves_after_random_changes_match_a_sorted_list(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = random_records(generator, 15)
    index, order = index_of(rows)
    for number in range(100, 130):
        match int(generator.integers(4)):
            case 0:
                parent = rows[int(generator.integers(len(rows)))] if rows else None
                row = make_record(number, parent, last_use=float(generator.integers(20)))
                rows.append(row)
                add_all(index, [row])
            case 1 if rows:
                at = int(generator.integers(len(rows)))
                index.record_uses([rows[at].id], float(generator.integers(20)))
                used = index.get(rows[at].id)
                assert used is not None
                assert used.last_use >= rows[at].last_use
                assert used.uses == rows[at].uses + 1
                rows[at] = used
            case 2:
                with closing(order.oldest(lambda _: False)) as victims:
                    seen = [row.id for row, _ in zip(victims, range(3), strict=False)]  # none of them is removed
                assert len(seen) == len(set(seen)) == min(3, len(leaves_of(rows)))
            case _:
                victim = next(iter(leaves_of(rows)), None)
                with closing(order.oldest(lambda _: False)) as victims:
                    chosen = next(victims, None)
                    assert (chosen is None) == (victim is None)
                    if chosen is not None and victim is not None:
                        assert (chosen.last_use, chosen.start) == (victim.last_use, victim.start)
                        rows.remove(chosen)
                        forget(index, [chosen])


def test_lru_leaves_stale_entries_are_swept() -> None:
    parent = make_record(1)
    index, order = index_of([parent])
    for number in range(2, 3 * LARGEST_REST):
        child = make_record(number, parent)
        add_all(index, [child])
        forget(index, [child])
    assert len(order) <= LARGEST_REST + 8
    with closing(order.oldest(lambda _: False)) as victims:
        assert [row.id for row in victims] == [parent.id]


@pytest.mark.parametrize("num_pinned", [0, 5])
@pytest.mark.perf
def test_lru_leaves_next_victim_takes_constant_time(num_pinned: int) -> None:
    def median_s(size: int) -> float:
        rows: list[BlockRecord] = []
        for number in range(size):
            parent = rows[-1] if number % 200 else None
            rows.append(make_record(number + 1, parent, last_use=float(number)))
        index, order = index_of(rows)
        pinned = {rows[200 * number + 199].id.key for number in range(num_pinned)}
        times_s: list[float] = []
        for _ in range(51):
            began_s = time.perf_counter()
            with closing(order.oldest(pinned.__contains__)) as victims:
                row = next(victims)
                forget(index, [row])
            times_s.append(time.perf_counter() - began_s)
        return sorted(times_s)[25]

    small_s, large_s = median_s(2_000), median_s(20_000)
    assert large_s < 5 * small_s, (small_s, large_s)


def tree(root: bytes, first: int) -> list[BlockRecord]:
    base = make_record(first, root=root, tokens=4)
    child = make_record(first + 1, base, root=root, tokens=7)
    other = make_record(first + 2, base, root=root, tokens=3)
    return [base, child, other, replace(child, id=BlockId(child.id.key, "mark"))]


def test_index_finds_records_by_id_and_parent_and_counts_them() -> None:
    index = BlockIndex()
    ours, theirs = tree(ROOT, 1), tree(OTHER_ROOT, 11)
    add_all(index, [*ours, *theirs])
    assert all(index.get(row.id) is row for row in (*ours, *theirs))
    assert index.get(BlockId(ours[0].id.key, "mark")) is None
    assert index.lengths_after(ROOT) == (4,)
    assert index.lengths_after(ours[0].id.key) == (7, 3)
    assert index.lengths_after(ours[1].id.key) == ()
    assert [index.is_leaf(row.id) for row in ours] == [False, False, True, True]
    assert index.totals() == IndexTotals(6, 28, 8 * 4096, {"codec:raw": 842})
    add_all(index, [replace(ours[2], num_tokens=5, disk_bytes=8192)])
    assert index.lengths_after(ours[0].id.key) == (7, 5)
    assert index.totals() == IndexTotals(6, 30, 9 * 4096, {"codec:raw": 842})
    forget(index, [ours[3], ours[3]])
    assert index.is_leaf(ours[1].id)
    forget(index, [ours[1]])
    assert index.lengths_after(ours[0].id.key) == (5,)
    assert sorted(row.id.key for row in index.records(ROOT)) == [ours[0].id.key, ours[2].id.key]
    forget(index, [*ours, *theirs])
    assert index.totals() == IndexTotals(0, 0, 0, {})
    assert index.records() == []
    assert index.num_known_keys == 0


def test_index_totals_of_many_roots_sum_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write and eviction reads the totals under the lock that lookups take."""
    summed: list[RunningTotals] = []
    count_all = RunningTotals.count_all
    monkeypatch.setattr(
        RunningTotals, "count_all", lambda sums, other, sign: (summed.append(other), count_all(sums, other, sign))
    )
    index, roots = BlockIndex(), [bytes([number]) * 32 for number in range(1, 101)]
    for number, root in enumerate(roots):
        add_all(index, tree(root, 10 * number))
        assert index.totals().num_blocks == 3 * (number + 1)
    forget(index, index.records(roots[0]))
    assert index.totals() == IndexTotals(3 * 99, 14 * 99, 4 * 4096 * 99, {"codec:raw": 421 * 99})
    assert summed == []
    assert index.hide_roots(roots[1], 0.0).num_blocks == 3
    assert index.totals() == IndexTotals(3 * 98, 14 * 98, 4 * 4096 * 98, {"codec:raw": 421 * 98})
    assert len(summed) == 2  # of the removed root


def test_hidden_records_are_not_found_and_stay_pending_until_deleted() -> None:
    index = BlockIndex()
    index.set_complete()
    ours, theirs = tree(ROOT, 1), tree(OTHER_ROOT, 11)
    add_all(index, [*ours, *theirs])
    assert index.hide_roots(ROOT, 0.0) == IndexTotals(3, 14, 4 * 4096, {"codec:raw": 421})
    assert index.hide_roots(ROOT, 0.0) == IndexTotals(0, 0, 0, {})
    assert not any(index.get(row.id) for row in ours)
    assert index.lengths_after(ROOT) == index.lengths_after(ours[0].id.key) == ()
    assert all(index.get(row.id) is row for row in theirs)
    assert index.totals() == IndexTotals(3, 14, 4 * 4096, {"codec:raw": 421})
    assert index.pending.num_bytes == 4 * 4096
    assert index.add(ours[0], lambda: True)  # put again
    assert index.pending.get(ours[0].id) is None
    assert index.pending.num_bytes == 3 * 4096
    assert index.lengths_after(ROOT) == (4,)
    assert index.hide([theirs[3].id, make_id(99)]).disk_bytes == 4096
    left = index.pending.records()
    assert {row.id for row in left} == {ours[1].id, ours[2].id, ours[3].id, theirs[3].id}
    index.files_deleted(left)
    assert index.pending.num_bytes == 0
    assert index.pending.next_records(10) == []
    assert index.get(ours[0].id) is ours[0]
    assert index.hide_roots(b"", 0.0).num_blocks == 4
    index.files_deleted(index.pending.records())
    assert index.num_known_keys == 0


def make_id(number: int) -> BlockId:
    return BlockId(key_of(number))


def test_pending_deletes_yield_children_first_and_retry_stuck_files_after_a_clear() -> None:
    index = BlockIndex()
    rows = tree(ROOT, 1)
    add_all(index, rows)
    index.hide_roots(b"", 0.0)
    assert index.pending.next_records(3) == rows[:0:-1]
    for row in rows:
        index.pending.set_stuck(row)
    assert index.pending.next_records(3) == []
    assert index.pending.num_bytes == 4 * 4096
    assert index.pending.get(rows[0].id) is rows[0]
    index.hide_roots(OTHER_ROOT, 0.0)
    assert len(index.pending.next_records(10)) == 4


def test_add_covered_by_a_marker_hides_the_record_until_the_index_is_complete() -> None:
    index = BlockIndex()
    ours, theirs = tree(ROOT, 1), tree(OTHER_ROOT, 11)
    index.hide_roots(ROOT, 5.0)
    assert [index.add(row) for row in (*ours, *theirs)] == [False] * 4 + [True] * 4
    assert {row.id for row in index.records()} == {row.id for row in theirs}
    assert index.pending.num_bytes == 4 * 4096
    index.hide_durably([theirs[1].id], 6.0)
    assert not index.add(theirs[1])
    newer = replace(theirs[1], created=index.time_of_record(3.0))
    assert newer.created > 6.0
    assert index.add(newer)
    index.set_complete()
    assert index.add(ours[0])


def test_add_unwanted_record_hides_it() -> None:
    index = BlockIndex()
    row = make_record(1)
    assert index.add(row, lambda: True)
    assert index.get(row.id) is row
    assert not index.add(row, lambda: False)
    assert index.get(row.id) is None
    assert index.pending.records() == [row]


def test_new_markers_stay_until_written_and_none_for_a_complete_index_without_pending_deletes() -> None:
    index = BlockIndex()
    ours = tree(ROOT, 1)
    index.hide_roots(ROOT, 5.0)
    (marker,) = index.new_markers()
    assert marker == ClearMarker(5.0, ROOT)
    index.hide_roots(ROOT, 6.0)
    index.markers_written([marker])
    assert index.has_new_markers
    assert index.new_markers() == [ClearMarker(6.0, ROOT)]
    index.set_complete()
    index.hide_roots(ROOT, 7.0)
    assert index.new_markers() == []
    assert not index.has_new_markers
    add_all(index, [replace(row, created=8.0) for row in ours])
    index.hide([ours[3].id])
    assert index.new_markers() == []
    index.hide_durably([ours[1].id], 4.0)
    assert index.new_markers() == [ClearMarker(8.0, blocks=frozenset([ours[1].id]))]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=40))
def test_saved_changes_are_the_difference_to_the_last_save(steps: list[tuple[int, int]]) -> None:
    index, saved = BlockIndex(), dict[BlockId, BlockRecord]()
    rows = [make_record(number + 1) for number in range(10)]
    for operation, number in steps:
        row = rows[number]
        there = index.get(row.id)
        match operation:
            case 0:
                index.add(row)
            case 1:
                index.record_uses([row.id], 3.0)
            case 2 if there is not None:
                index.forget([there], RemovalCause.LOST)
            case 3:
                index.hide([row.id])
            case 4:
                index.files_deleted(index.pending.records())
            case _:
                changed, removed = index.take_unsaved(3)
                assert len(changed) + len(removed) <= 3
                saved |= {each.id: each for each in changed}
                for block in removed:
                    saved.pop(block, None)
    index.files_deleted(index.pending.records())
    while index.num_unsaved:
        changed, removed = index.take_unsaved(3)
        saved |= {each.id: each for each in changed}
        for block in removed:
            saved.pop(block, None)
    assert saved == {row.id: row for row in index.records()}
