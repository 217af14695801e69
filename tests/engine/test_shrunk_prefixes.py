"""Waiting requests whose prefix is evicted before they start: the tiers are asked again, and no memory is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstrata.engine.config import EngineLimits
from kvstrata.engine.sequence import Sequence
from kvstrata.kv.packing import count_labels
from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.options import DiskOptions
from tests.engine.drive import Client, Drive
from tests.engine.test_disk import MIB, make_computing_slow
from tests.engine.test_loop import assert_same, prompt
from tests.engine.test_prefixes import DRAWN, cached, prefilled_tokens, serve, settle, steady_loaded

PROMPT_TOKENS = 600


@contextmanager
def disk_drive(folder: Path, *, kv_tokens: int | None = None, **limits: Any) -> Iterator[Drive]:
    """An engine core with a disk that is faster than computing."""
    loaded = steady_loaded("llama")
    tier = DiskTier(
        DiskOptions(folder, 256 * MIB, queue_bytes=64 * MIB, reserve_bytes=0), chain=chain, tally=count_labels
    )
    kv_bytes = None if kv_tokens is None else Drive(loaded).budget.bytes_for(kv_tokens)
    drive = Drive(loaded, EngineLimits(**limits), kv_bytes=kv_bytes, tier=tier)
    make_computing_slow(drive.core)
    yield drive
    tier.close()


def write_all(drive: Drive) -> None:
    """Write all cached KV that is not in use to the disk."""
    drive.prefix_cache.offloader.offer_changed()
    settle(drive)
    assert drive.prefix_cache.disk.tier.flush(60).is_empty


def run(drive: Drive) -> None:
    """Run to the end: steps are made while the disk works."""
    drive.run(most_steps=1_000_000)


def submit_behind_a_stream(drive: Drive, tokens: list[int]) -> Client:
    """Submit a request that waits behind a stream, after its first lookup."""
    drive.submit(prompt(20, seed=2), 8)
    while not drive.core.sequences.running:
        drive.core.executor.step()
    client = drive.submit(tokens, 4)
    drive.core.executor.step()
    assert [each.request for each in drive.core.sequences.waiting] == [client.request]
    return client


def test_prefix_that_is_evicted_between_lookup_and_lease_is_read_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk_drive(tmp_path) as drive:
        tokens = prompt(PROMPT_TOKENS, seed=1)
        first = serve(drive, tokens)
        write_all(drive)
        start = drive.core.prefix_lookup.start

        def start_after_eviction(sequence: Sequence, capacity_for: Callable[[int], int]) -> bool:
            monkeypatch.undo()
            drive.prefix_cache.evictor.clear(tier="hot")
            return start(sequence, capacity_for)

        monkeypatch.setattr(drive.core.prefix_lookup, "start", start_after_eviction)
        again = drive.submit(tokens, 4, DRAWN)
        run(drive)
        assert cached(again) == PROMPT_TOKENS - 1
        assert_same(again, first)


def test_prefix_that_is_evicted_while_its_request_waits_is_read_from_the_disk(tmp_path: Path) -> None:
    with disk_drive(tmp_path, max_running=1) as drive:
        tokens = prompt(PROMPT_TOKENS, seed=1)
        serve(drive, tokens)
        write_all(drive)
        waiting = submit_behind_a_stream(drive, tokens)
        drive.prefix_cache.evictor.clear(tier="hot")
        run(drive)
        assert cached(waiting) == PROMPT_TOKENS - 1


def test_request_whose_prefix_is_evicted_each_time_computes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disk_drive(tmp_path) as drive:
        tokens = prompt(PROMPT_TOKENS, seed=1)
        serve(drive, tokens)
        write_all(drive)
        start = drive.core.prefix_lookup.start

        def start_after_eviction(sequence: Sequence, capacity_for: Callable[[int], int]) -> bool:
            drive.prefix_cache.evictor.clear(tier="hot")
            return start(sequence, capacity_for)

        monkeypatch.setattr(drive.core.prefix_lookup, "start", start_after_eviction)
        again = drive.submit(tokens, 4, DRAWN)
        run(drive)
        assert cached(again) == 0


def test_preempted_sequence_resumes_from_what_the_disk_has(tmp_path: Path) -> None:
    with disk_drive(tmp_path, kv_tokens=400, buffer_step_tokens=16) as drive:
        clients = [drive.submit(prompt(100, seed=seed), 150, DRAWN) for seed in range(3)]
        run(drive)
        assert drive.num_preempted() > 0
        assert all(client.finished.usage.completion_tokens == 150 for client in clients)
        assert prefilled_tokens(drive) == 3 * 99


def test_evicted_prefix_frees_memory_at_once_though_a_request_waits() -> None:
    drive = Drive(steady_loaded("llama"), EngineLimits(max_running=1))
    tokens = prompt(PROMPT_TOKENS, seed=1)
    serve(drive, tokens)
    waiting = submit_behind_a_stream(drive, tokens)
    (entry,) = (entry for entry in drive.prefix_cache.table.entries if entry.span.num_tokens >= PROMPT_TOKENS)
    span = weakref.ref(entry.span)
    drive.prefix_cache.evictor.clear(tier="hot")
    assert span() is None
    drive.run()
    assert cached(waiting) == 0
