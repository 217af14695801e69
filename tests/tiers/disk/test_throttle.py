"""Rests of the writer: their length, and the events that end them. A rest here would last for years by itself."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import Block
from kvstrata.tiers.block_file import Checksum
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.disk.writer import LARGEST_NICENESS, NICENESS
from kvstrata.tiers.interface import Accepted
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.write_limits import SHORTEST_REST_S, SLICE_BYTES, Throttle, slices_of, unpaced
from tests.tiers.disk.blocks import ROOT, is_same, make_block, make_chain, read_now
from tests.tiers.disk.faults import FaultyFiles

T = TypeVar("T")

# Tensors of several slices: 4 bytes each in two rows, and 2 bytes each in one.
NUM_VALUES = SLICE_BYTES // 2
NEARLY_NOTHING = 1e-12


class Work:
    """Slices of work with given lengths, on a clock that only they advance."""

    def __init__(self, share: float) -> None:
        self.now_s = 0.0
        self.rests_s: list[float] = []
        self.strides = Throttle(self.rests_s.append, share=share, clock=lambda: self.now_s)

    def do(self, seconds: float) -> None:
        self.strides.pace(lambda: self._pass(seconds))

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds


@given(
    st.lists(st.floats(0, 0.1), min_size=1, max_size=50),
    st.floats(0.01, 1.0),
)
def test_throttle_rests_match_the_share(lengths_s: list[float], share: float) -> None:
    work = Work(share)
    for length_s in lengths_s:
        work.do(length_s)
    owed_s = work.now_s / share - work.now_s
    assert owed_s - SHORTEST_REST_S <= sum(work.rests_s) + 1e-6
    assert sum(work.rests_s) <= owed_s + 1e-6
    assert all(rest_s >= SHORTEST_REST_S for rest_s in work.rests_s)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_throttle_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="at most 1"):
        Throttle(lambda _: None, share=share)


@given(st.sampled_from([0, 1, SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES]))
def test_slices_join_to_the_whole_content(nbytes: int) -> None:
    content = (b"0123456789abcdef!" * (nbytes // 17 + 1))[:nbytes]
    strides = list(slices_of(memoryview(content)))
    assert b"".join(strides) == content
    assert all(0 < stride.nbytes <= SLICE_BYTES for stride in strides)


@pytest.mark.parametrize("checksum", list(Checksum))
def test_checksum_in_slices_equals_that_of_the_whole(checksum: Checksum) -> None:
    content = memoryview(bytes(range(256)) * (5 * SLICE_BYTES // 512))
    num_strides = 0

    def take(stride: Callable[[], T], /) -> T:
        nonlocal num_strides
        num_strides += 1
        return unpaced(stride)

    assert checksum.of(content, take) == checksum.of(content)
    assert num_strides == 3


def resting_tier(folder: Path, files: FaultyFiles | None = None, *, queue_bytes: int = 1 << 30) -> DiskTier:
    """Open a tier whose writer rests without end after its first slice."""
    options = DiskOptions(folder, 1 << 30, reserve_bytes=0, queue_bytes=queue_bytes, writer_share=NEARLY_NOTHING)
    return DiskTier(options, chain=chain, files=files)


def queue_all(tier: DiskTier, blocks: list[Block]) -> None:
    assert [tier.put(block) for block in blocks] == [Accepted()] * len(blocks)


def test_flush_ends_a_rest_and_resting_blocks_are_readable(tmp_path: Path) -> None:
    tier = resting_tier(tmp_path)
    block = make_block(num_values=NUM_VALUES)
    queue_all(tier, [block])
    assert is_same(read_now(tier, block.id, root=ROOT), block)
    assert not tier.flush(0).is_empty
    assert tier.flush(60).is_empty
    assert tier.usage().num_blocks == 1
    assert is_same(read_now(tier, block.id, root=ROOT), block)
    tier.close()


def test_queue_above_a_quarter_is_written_without_rests(tmp_path: Path) -> None:
    blocks = make_chain(4, num_values=NUM_VALUES)
    written = threading.Semaphore(0)
    files = FaultyFiles(before={"rename": lambda: written.release()})
    tier = resting_tier(tmp_path, files, queue_bytes=4 * blocks[0].nbytes)
    queue_all(tier, blocks)
    # No caller flushes. Blocks above the quarter are written at once; the last block waits in a rest.
    assert all(written.acquire(timeout=60) for _ in range(3))
    assert not written.acquire(timeout=0.2)
    tier.close()


def test_close_ends_a_rest_and_finishes_the_current_block(tmp_path: Path) -> None:
    tier = resting_tier(tmp_path)
    queue_all(tier, make_chain(2, num_values=NUM_VALUES))
    tier.close()
    usage = tier.usage()
    assert usage.counters.get("written", {}).get("base", 0) + usage.counters["dropped"]["closed"] == 2
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
def test_writer_started_by_a_niced_thread_is_nicer(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def run() -> None:
        own = min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own)
        tier = resting_tier(tmp_path)
        assert tier.flush(60).is_empty
        (writer,) = [thread for thread in threading.enumerate() if thread.name == "kvstrata-disk-writer"]
        assert writer.native_id is not None
        seen.append((own, os.getpriority(os.PRIO_PROCESS, writer.native_id)))
        tier.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((own, of_writer),) = seen
    assert of_writer == min(own + NICENESS, LARGEST_NICENESS)
