"""The writer thread, on a store that writes no files."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.tiers.block import Block
from kvstrata.tiers.disk.block_store import CaughtUp, DroppedBlock, Published, WriteFailed
from kvstrata.tiers.disk.errors import DISK_EVENTS, DiskFault, DropReason
from kvstrata.tiers.disk.writer import MAX_ATTEMPTS, DiskWriter
from kvstrata.tiers.interface import Refusal, Refused, RemovalLog, TierCounters
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.write_limits import Pace
from tests.support.eventually import eventually
from tests.tiers.disk.blocks import make_block, make_chain


class Publishing:
    """A store that writes nothing and calls a function for each block."""

    def __init__(self, publish: Callable[..., Published | DroppedBlock | WriteFailed]) -> None:
        self.publish = publish

    def catch_up(self) -> CaughtUp:
        return CaughtUp()

    def save(self) -> None:
        return

    def expire(self, is_needed: Callable[[bytes], bool]) -> float:  # noqa: ARG002
        return math.inf


def make_writer(
    publish: Callable[..., Published | DroppedBlock | WriteFailed],
    counters: TierCounters,
    first_pause_s: float = 60,
    limit_bytes: int = 1 << 30,
) -> DiskWriter:
    options = DiskOptions(Path(), 0, queue_bytes=limit_bytes, first_pause_s=first_pause_s)
    return DiskWriter(Publishing(publish), options, counters, RemovalLog(), lambda: None)


def test_writer_child_queued_during_a_write_keeps_its_parent() -> None:
    parent, child = make_chain(2)
    has_begun, goes_on = threading.Event(), threading.Event()
    kept: list[bool] = []

    def publish(_: Block, is_needed: Callable[[bytes], bool], __: Callable[[], bool], ___: Pace) -> DroppedBlock:
        kept.append(is_needed(parent.key))
        has_begun.set()
        assert goes_on.wait(10)
        kept.append(is_needed(parent.key))
        return DroppedBlock(DropReason.NO_ROOM)

    writer = make_writer(publish, TierCounters(DISK_EVENTS))
    assert writer.offer(make_block(9)) is None
    assert has_begun.wait(10)
    assert writer.offer(child) is None
    goes_on.set()
    assert writer.flush(10).is_empty
    assert kept[:2] == [False, True]
    assert writer.close(10)


@pytest.mark.parametrize(
    "outcome", [WriteFailed(DiskFault.NO_SPACE, ""), DroppedBlock(DropReason.RESERVE), DroppedBlock(DropReason.NO_ROOM)]
)
def test_writer_dropped_block_drops_its_descendants_only(outcome: WriteFailed | DroppedBlock) -> None:
    first, second, third = make_chain(3)
    mark = replace(third, part="mark")
    other, tried, goes_on = make_block(9), list[Block](), threading.Event()

    def publish(block: Block, *_: object) -> Published | WriteFailed | DroppedBlock:
        assert goes_on.wait(10)
        tried.append(block)
        return outcome if block is second else Published(1)

    counters = TierCounters(DISK_EVENTS)
    writer = make_writer(publish, counters)
    for block in (first, second, third, mark, other):
        assert writer.offer(block) is None
    goes_on.set()
    assert writer.flush(10).is_empty
    assert tried[-1] is other
    assert not {third.id, mark.id} & {block.id for block in tried}
    assert bool(writer.state(0).num_faults) == (outcome != DroppedBlock(DropReason.NO_ROOM))
    assert writer.close(10)


def test_writer_block_that_always_fails_is_dropped_after_max_attempts() -> None:
    bad, good = make_block(1), make_block(2)
    num_attempts, is_written = 0, threading.Event()

    def publish(block: Block, *_: object) -> Published | WriteFailed:
        nonlocal num_attempts
        if block is bad:
            num_attempts += 1
            return WriteFailed(DiskFault.OTHER, "a defect of ours")
        is_written.set()
        return Published(1)

    writer = make_writer(publish, TierCounters(DISK_EVENTS), first_pause_s=1e-4)
    assert writer.offer(bad) is None
    eventually(lambda: writer.offer(good) is not Refusal.PAUSED)
    assert is_written.wait(10)
    assert num_attempts == MAX_ATTEMPTS
    assert writer.state(0).num_faults == MAX_ATTEMPTS
    assert writer.close(10)


def test_queue_block_above_the_limit_is_accepted_when_empty() -> None:
    first, second = make_chain(2)
    goes_on, written = threading.Event(), list[Block]()

    def publish(block: Block, *_: object) -> Published:
        assert goes_on.wait(10)
        written.append(block)
        return Published(1)

    writer = make_writer(publish, TierCounters(DISK_EVENTS), limit_bytes=first.nbytes - 1)
    assert writer.offer(first) is None
    assert writer.offer(second) is Refusal.QUEUE_FULL
    refused = Refused(Refusal.QUEUE_FULL, second.nbytes)
    assert not writer.state(0).would_take(refused)
    goes_on.set()
    assert writer.flush(10).is_empty
    assert writer.state(0).would_take(refused)
    assert writer.offer(second) is None
    assert writer.flush(10).is_empty
    assert written == [first, second]
    assert writer.close(10)
