"""Bounds on writing, without a tier: pauses after faults, and the queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.tiers.block import BlockId
from kvstrata.tiers.interface import BlockEvent, Refusal, TierCounters
from kvstrata.tiers.write_limits import Backoff, WriteQueue
from tests.tiers.disk.blocks import make_block, make_chain
from tests.tiers.timing import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_backoff_doubles_up_to_the_limit_and_begins_anew_after_a_success(clock: Clock) -> None:
    backoff = Backoff(5.0, 300.0, clock)
    lengths_s: list[float] = []
    for _ in range(10):
        backoff.begin("io_error")
        lengths_s.append(backoff.remaining_s)
        clock.now_s += backoff.remaining_s
        assert not backoff.is_paused
    assert lengths_s == [5, 10, 20, 40, 80, 160, 300, 300, 300, 300]
    assert backoff.end()
    assert not backoff.end(), "a success after a success is no news"
    backoff.begin("io_error")
    assert backoff.remaining_s == 5


def test_backoff_first_pause_above_the_limit_keeps_its_length(clock: Clock) -> None:
    backoff = Backoff(600.0, 300.0, clock)
    for _ in range(2):
        backoff.begin("io_error")
        assert backoff.remaining_s == 600


def test_backoff_reports_a_reason_only_when_it_changes(clock: Clock) -> None:
    backoff = Backoff(1.0, 60.0, clock)
    reasons = ("full", "full", "denied", "denied", "full")
    assert [backoff.begin(reason) for reason in reasons] == [True, False, True, False, True]


def test_backoff_lifted_pauses_longer_after_the_next_fault(clock: Clock) -> None:
    backoff = Backoff(1.0, 60.0, clock)
    backoff.begin("full")
    backoff.lift()
    assert not backoff.is_paused
    assert backoff.reason == "full"
    assert not backoff.begin("full")
    assert backoff.remaining_s == 2


def test_queue_unreachable_without_returns_descendants() -> None:
    queue = WriteQueue(1 << 30)
    first, second, third = make_chain(3)
    checkpoint, other = replace(second, part="mark"), make_block(9)
    for block in (first, second, checkpoint, third, other):
        assert queue.add(block) is None
    entries = {entry.block.id: entry for entry in queue.entries()}

    def unreachable(block_id: BlockId) -> list[BlockId]:
        return [entry.block.id for entry in queue.unreachable_without(entries[block_id])]

    assert unreachable(second.id) == [second.id, checkpoint.id, third.id]
    assert unreachable(checkpoint.id) == [checkpoint.id]
    assert unreachable(other.id) == [other.id]


def test_queue_needs_keys_and_parents_of_its_entries_until_the_last_one_leaves() -> None:
    queue = WriteQueue(1 << 30)
    first, second = make_chain(2)
    checkpoint = replace(second, part="mark")
    for block in (second, checkpoint):
        assert queue.add(block) is None
    assert [queue.needs(key) for key in (first.parent, first.key, second.key)] == [False, True, True]
    for num_left, entry in enumerate(reversed(queue.entries())):
        queue.remove(entry)
        queue.remove(entry)
        assert [queue.needs(key) for key in (first.key, second.key)] == [num_left == 0] * 2


def test_queue_block_queued_again_has_a_new_entry() -> None:
    queue = WriteQueue(1 << 30)
    (block,) = make_chain(1)
    assert queue.add(block) is None
    assert queue.add(block) is Refusal.PRESENT
    (withdrawn,) = queue.entries()
    queue.remove(withdrawn)
    assert not queue.has(withdrawn)
    assert queue.add(block) is None
    queue.remove(withdrawn)
    assert (len(queue), queue.num_bytes, queue.num_children(block.parent)) == (1, block.nbytes, 1)
    (entry,) = queue.entries()
    queue.remove(entry)
    assert (len(queue), queue.num_bytes, queue.lengths_after(block.parent)) == (0, 0, set())


def test_counters_report_the_events_of_their_tier_in_a_fixed_order() -> None:
    counters = TierCounters({BlockEvent.READ, BlockEvent.WRITTEN})
    counters.add(BlockEvent.READ, "disk", nbytes=5, num_tokens=2)
    counters.add(BlockEvent.READ, "disk", nbytes=5, num_tokens=2)
    assert list(counters.snapshot().items()) == [("written", {}), ("read", {"disk": 2})]
    assert (counters.nbytes(BlockEvent.READ), counters.num_tokens(BlockEvent.READ)) == (10, 4)
    with pytest.raises(KeyError):
        counters.add(BlockEvent.SKIPPED)
