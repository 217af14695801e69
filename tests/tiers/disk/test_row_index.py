"""Rows in memory and the order in which they go, against plain lists of the same rows."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.tiers.block import BASE, BlockId
from kvstrata.tiers.disk.index import LARGEST_REST, BlockRow, RowIndex, RowTotals, Sums, Victims, write_tally
from tests.tiers.disk.blocks import OTHER_ROOT, ROOT


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def make_row(
    number: int,
    parent: BlockRow | None = None,
    *,
    root: bytes = ROOT,
    last_use: float = 0.0,
    part: str = BASE,
    tokens: int = 1,
) -> BlockRow:
    above, start = (root, 0) if parent is None else (parent.id.key, parent.start + parent.num_tokens)
    tally = write_tally({"codec:raw": 100 + tokens})
    return BlockRow(BlockId(key_of(number), part), above, root, start, tokens, 4096, last_use, 0, 0.0, tally)


def random_rows(generator: np.random.Generator, size: int) -> list[BlockRow]:
    """Trees of bases, and other parts of some of them."""
    rows: list[BlockRow] = []
    for index in range(size):
        above = int(generator.integers(-1, index)) if index else -1
        parent = rows[above] if above >= 0 else None
        rows.append(make_row(index + 1, parent, last_use=float(generator.integers(12))))
    extras = [
        replace(row, id=BlockId(row.id.key, "mark"), last_use=float(generator.integers(12)))
        for row in rows
        if generator.random() < 0.3
    ]
    return rows + extras


def leaves_of(rows: list[BlockRow]) -> list[BlockRow]:
    """What can go without breaking a chain, the oldest first."""

    def is_leaf(row: BlockRow) -> bool:
        if row.id.part != BASE:
            return True
        hang_on_it = (o for o in rows if o.parent == row.id.key or (o.id.key == row.id.key and o.id.part != BASE))
        return not any(hang_on_it)

    return sorted(filter(is_leaf, rows), key=lambda row: (row.last_use, -row.start))


def filled(rows: list[BlockRow]) -> tuple[RowIndex, Victims]:
    index = RowIndex()
    index.add_found(rows)
    return index, Victims(index)


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 12))
def test_the_victim_is_always_the_oldest_leaf_that_is_left(seed: int, size: int, num_pinned: int) -> None:
    generator = np.random.default_rng(seed)
    rows = random_rows(generator, size)
    pinned = {rows[int(number)].id.key for number in generator.integers(0, size, num_pinned)}
    index, order = filled(rows)
    with closing(order.oldest(pinned.__contains__)) as victims:
        for victim in victims:
            allowed = [row for row in leaves_of(rows) if row.id.key not in pinned]
            assert (victim.last_use, -victim.start) == (allowed[0].last_use, -allowed[0].start)
            assert victim in allowed
            rows.remove(victim)
            index.discard([victim.id])
            order.removed([victim])
    assert all(row.id.key in pinned for row in leaves_of(rows))
    assert sorted(index.rows(), key=str) == sorted(rows, key=str)


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_the_order_follows_what_is_added_used_passed_over_and_removed(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = random_rows(generator, 15)
    index, order = filled(rows)
    for number in range(100, 130):
        match int(generator.integers(4)):
            case 0:
                parent = rows[int(generator.integers(len(rows)))] if rows else None
                row = make_row(number, parent, last_use=float(generator.integers(20)))
                rows.append(row)
                index.add_found([row])
                order.added([row])
            case 1 if rows:
                at = int(generator.integers(len(rows)))
                index.touch({rows[at].id: (1, float(generator.integers(20)))})
                used = index.row(rows[at].id)
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
                        index.discard([chosen.id])
                        order.removed([chosen])


def test_entries_that_are_out_of_date_are_swept_out() -> None:
    parent = make_row(1)
    index, order = filled([parent])
    for number in range(2, 3 * LARGEST_REST):
        child = make_row(number, parent)
        index.add_found([child])
        order.added([child])
        index.discard([child.id])
        order.removed([child])
    assert len(order._heap) <= LARGEST_REST + 8
    with closing(order.oldest(lambda _: False)) as victims:
        assert [row.id for row in victims] == [parent.id]


@pytest.mark.parametrize("num_pinned", [0, 5])
def test_a_victim_costs_the_same_whatever_the_number_of_rows(num_pinned: int) -> None:
    def median_s(size: int) -> float:
        rows: list[BlockRow] = []
        for number in range(size):
            parent = rows[-1] if number % 200 else None
            rows.append(make_row(number + 1, parent, last_use=float(number)))
        index, order = filled(rows)
        pinned = {rows[200 * number + 199].id.key for number in range(num_pinned)}
        times_s: list[float] = []
        for _ in range(51):
            began_s = time.perf_counter()
            with closing(order.oldest(pinned.__contains__)) as victims:
                row = next(victims)
                index.discard([row.id])
                order.removed([row])
            times_s.append(time.perf_counter() - began_s)
        return sorted(times_s)[25]

    small_s, large_s = median_s(2_000), median_s(20_000)
    assert large_s < 5 * small_s, (small_s, large_s)


def tree(root: bytes, first: int) -> list[BlockRow]:
    base = make_row(first, root=root, tokens=4)
    child = make_row(first + 1, base, root=root, tokens=7)
    other = make_row(first + 2, base, root=root, tokens=3)
    return [base, child, other, replace(child, id=BlockId(child.id.key, "mark"))]


def test_rows_are_found_by_id_and_by_parent_and_counted() -> None:
    index = RowIndex()
    ours, theirs = tree(ROOT, 1), tree(OTHER_ROOT, 11)
    index.add_found([*ours, *theirs])
    assert all(index.row(row.id) is row for row in (*ours, *theirs))
    assert index.row(BlockId(ours[0].id.key, "mark")) is None
    assert index.lengths(ROOT) == (4,)
    assert index.lengths(ours[0].id.key) == (7, 3)
    assert index.lengths(ours[1].id.key) == ()
    assert [index.is_leaf(row.id) for row in ours] == [False, False, True, True]
    assert index.totals() == RowTotals(6, 28, 8 * 4096, {"codec:raw": 842})
    index.add_found([replace(ours[2], num_tokens=5, disk_bytes=8192)])
    assert index.lengths(ours[0].id.key) == (7, 5)
    assert index.totals() == RowTotals(6, 30, 9 * 4096, {"codec:raw": 842})
    index.discard([ours[3].id, ours[3].id])
    assert index.is_leaf(ours[1].id)
    index.discard([ours[1].id])
    assert index.lengths(ours[0].id.key) == (5,)
    assert sorted(row.id.key for row in index.rows(ROOT)) == [ours[0].id.key, ours[2].id.key]
    index.discard(row.id for row in (*ours, *theirs))
    assert index.totals() == RowTotals(0, 0, 0, {})
    assert index.rows() == []
    assert index._sections._root_of == {}
    assert index._sections._by_root == {}


def test_totals_of_many_roots_cost_the_same_as_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write and each eviction asks for them, under the lock that lookups take."""
    summed: list[Sums] = []
    count_all = Sums.count_all
    monkeypatch.setattr(
        Sums, "count_all", lambda sums, other, sign: (summed.append(other), count_all(sums, other, sign))
    )
    index, roots = RowIndex(), [bytes([number]) * 32 for number in range(1, 101)]
    for number, root in enumerate(roots):
        index.add_found(tree(root, 10 * number))
        assert index.totals().num_blocks == 3 * (number + 1)
    index.discard(row.id for row in index.rows(roots[0]))
    assert index.totals() == RowTotals(3 * 99, 14 * 99, 4 * 4096 * 99, {"codec:raw": 421 * 99})
    assert summed == []
    assert index.hide_under(roots[1]).num_blocks == 3
    assert index.totals() == RowTotals(3 * 98, 14 * 98, 4 * 4096 * 98, {"codec:raw": 421 * 98})
    assert len(summed) == 2  # of the root that was taken away


def test_what_is_hidden_is_not_found_and_stays_counted_until_its_files_are_gone() -> None:
    index = RowIndex()
    ours, theirs = tree(ROOT, 1), tree(OTHER_ROOT, 11)
    index.add_found([*ours, *theirs])
    assert index.hide_under(ROOT) == RowTotals(3, 14, 4 * 4096, {"codec:raw": 421})
    assert index.hide_under(ROOT) == RowTotals(0, 0, 0, {})
    assert not any(index.row(row.id) for row in ours)
    assert index.lengths(ROOT) == index.lengths(ours[0].id.key) == ()
    assert all(index.row(row.id) is row for row in theirs)
    assert index.totals() == RowTotals(3, 14, 4 * 4096, {"codec:raw": 421})
    assert index.leaving.num_bytes == 4 * 4096
    assert index.add_if(ours[0], lambda: True)  # it was put again
    assert index.leaving.row(ours[0].id) is None
    assert index.leaving.num_bytes == 3 * 4096
    assert index.lengths(ROOT) == (4,)
    assert index.hide([theirs[3].id, key_id(99)]).disk_bytes == 4096
    left = index.leaving.rows()
    assert {row.id for row in left} == {ours[1].id, ours[2].id, ours[3].id, theirs[3].id}
    index.left(left)
    assert index.leaving.num_bytes == 0
    assert index.leaving.next_rows(10) == []
    assert index.row(ours[0].id) is ours[0]
    assert index.hide_under(b"").num_blocks == 4
    index.left(index.leaving.rows())
    assert index._sections._root_of == {}
    assert index._sections._labels.keys() == {row.tally for row in ours}


def key_id(number: int) -> BlockId:
    return BlockId(key_of(number))


def test_files_are_deleted_children_first_and_what_cannot_be_is_tried_again_later() -> None:
    index = RowIndex()
    rows = tree(ROOT, 1)
    index.add_found(rows)
    index.hide_under(b"")
    assert index.leaving.note() == [row.id for row in rows]
    assert index.leaving.note() == []
    assert index.leaving.next_rows(3) == rows[:0:-1]
    for row in rows:
        index.leaving.set_stuck(row)
    assert index.leaving.next_rows(3) == []
    assert index.leaving.num_bytes == 4 * 4096
    assert index.leaving.row(rows[0].id) is rows[0]
    index.hide_under(OTHER_ROOT)
    assert len(index.leaving.next_rows(10)) == 4


def test_what_is_found_of_a_root_that_was_cleared_meanwhile_leaves() -> None:
    index = RowIndex()
    ours, theirs = tree(ROOT, 1), tree(OTHER_ROOT, 11)
    index.hide_under(ROOT)
    index.add_found([*ours, *theirs])
    assert {row.id for row in index.rows()} == {row.id for row in theirs}
    assert index.leaving.num_bytes == 4 * 4096
    index.hide_under(b"")
    index.add_found([theirs[0]])
    assert index.rows() == []
    index.finish_comparing()
    index.add_found([theirs[0]])
    assert index.rows() == [theirs[0]]
    index.hide_under(b"")
    index.add_found([theirs[0]])
    assert index.rows() == [theirs[0]]


def test_a_row_that_is_not_wanted_any_more_when_it_comes_leaves() -> None:
    index = RowIndex()
    row = make_row(1)
    assert index.add_if(row, lambda: True)
    assert index.row(row.id) is row
    assert not index.add_if(row, lambda: False)
    assert index.row(row.id) is None
    assert index.leaving.rows() == [row]
