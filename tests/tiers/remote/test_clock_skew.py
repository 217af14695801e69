"""Servers with clocks that differ by days: reads and writes work, and only expiry is affected."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from kvstrata.engine import build
from kvstrata.tiers.block import BlockId
from kvstrata.tiers.remote.tier import RemoteTier
from tests.engine.test_disk import cached
from tests.support.models import tiny_loaded
from tests.tiers.disk.blocks import all_same
from tests.tiers.remote.chains import longest_chain, missing_chain, put_chain, random_ids, read_all
from tests.tiers.remote.stores import open_remote, secret_file
from tests.tiers.remote.test_engine import PROMPT, engine_on, generate, write_to_store

DAY_S = 86_400.0


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
def test_tier_servers_with_skewed_clocks_read_each_others_blocks(
    store_url: str, tmp_path: Path, ahead_s: float
) -> None:
    secret = secret_file(tmp_path)
    right, wrong = open_remote(store_url, secret), open_remote(store_url, secret, ahead_s=ahead_s)
    first, second = random_ids(41, 1024), random_ids(42, 1024)
    for writer, reader, ids in ((right, wrong, first), (wrong, right, second)):
        put = put_chain(writer, ids, (512,))
        assert longest_chain(reader, ids).num_tokens == 1024
        assert longest_chain(reader, ids, at_marks=True).num_tokens == 512
        assert missing_chain(reader, ids, (512,)).links == () == missing_chain(reader, ids, (512,)).marks
        came = read_all(reader, [block.id for block in put])
        assert all_same(came, put)
        reader.touch(block.id for block in put)
        assert reader.flush(10.0).is_empty
    for tier in (right, wrong):
        tier.block_store.sweep()  # blocks stay a week, so nothing has expired
        assert longest_chain(tier, first).num_tokens == longest_chain(tier, second).num_tokens == 1024
        assert tier.usage().counters["missed"] == {}
        tier.close()


@pytest.mark.parametrize(("ahead_s", "left_tokens"), [(2 * DAY_S, 0), (-2 * DAY_S, 1024)])
def test_sweep_with_a_clock_ahead_expires_blocks_early(store_url: str, ahead_s: float, left_tokens: int) -> None:
    """Valkey expires values by its own clock; in the other stores the server sweeps. Swept blocks are written again."""
    right, wrong = open_remote(store_url, ttl_s=DAY_S), open_remote(store_url, ttl_s=DAY_S, ahead_s=ahead_s)
    ids = random_ids(43, 1024)
    put_chain(right, ids)
    wrong.block_store.sweep()

    assert longest_chain(right, ids).num_tokens == (1024 if store_url.startswith("redis") else left_tokens)
    put_chain(right, ids)
    # In a folder a file that has expired by a server's own clock is absent for that server.
    assert longest_chain(wrong, ids).num_tokens == (left_tokens if store_url.startswith("file") else 1024)
    for tier in (right, wrong):
        tier.close()


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
def test_touch_with_a_skewed_clock_keeps_the_block(store_url: str, ahead_s: float) -> None:
    """A server writes an object again if it seems old by its clock; other stores record the time of the touch."""
    tier = open_remote(store_url, ttl_s=3 * DAY_S, ahead_s=ahead_s)
    ids = random_ids(44, 512)
    put = put_chain(tier, ids)
    tier.touch(BlockId(block.key) for block in put)
    assert tier.flush(10.0).is_empty
    came = read_all(tier, [block.id for block in put])

    assert all_same(came, put)
    tier.close()


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
def test_engine_with_a_skewed_clock_resumes_the_conversation(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    secret, replies = secret_file(tmp_path), []
    with engine_on(redis_url, tiny_loaded("llama"), secret) as first:
        generate(first, "one", PROMPT, 4)
        write_to_store(first)
    now = time.time
    for shift_s in (0.0, ahead_s):
        shifted = partial(RemoteTier, clock=lambda shift_s=shift_s: now() + shift_s)
        monkeypatch.setattr(build, "RemoteTier", shifted)
        monkeypatch.setattr(time, "time", lambda shift_s=shift_s: now() + shift_s)
        with engine_on(redis_url, tiny_loaded("llama"), secret) as other:
            replies.append(generate(other, "two", (*PROMPT, 1, 2, 3), 8))
        monkeypatch.undo()

    assert [cached(each) for each in replies] == [512, 512]
    assert replies[0].ids == replies[1].ids
