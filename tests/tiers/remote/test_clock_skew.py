"""Servers whose clocks differ by days: blocks go both ways as ever, and nothing but their expiry changes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from kvstrata.engine import build
from kvstrata.tiers.block import BlockId
from kvstrata.tiers.read_pool import LoadedBlock
from kvstrata.tiers.remote.tier import RemoteTier
from tests.engine.test_disk import cached
from tests.tiers.remote.chains import ids_of, match_of, put_chain, read_all, same, wanted
from tests.tiers.remote.stores import open_remote, secret_file
from tests.tiers.remote.test_engine import PROMPT, engine_on, say, share
from tests.tiny import tiny_loaded

DAY_S = 86_400.0


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
def test_tier_servers_with_skewed_clocks_read_each_others_blocks(
    store_url: str, tmp_path: Path, ahead_s: float
) -> None:
    secret = secret_file(tmp_path)
    right, wrong = open_remote(store_url, secret), open_remote(store_url, secret, ahead_s=ahead_s)
    first, second = ids_of(41, 1024), ids_of(42, 1024)
    for writer, reader, ids in ((right, wrong, first), (wrong, right, second)):
        put = put_chain(writer, ids, (512,))
        assert match_of(reader, ids).num_tokens == 1024
        assert match_of(reader, ids, at_marks=True).num_tokens == 512
        assert wanted(reader, ids, (512,)).links == () == wanted(reader, ids, (512,)).marks
        came = read_all(reader, [block.id for block in put])
        assert all(
            isinstance(back, LoadedBlock) and same(back.block, block) for back, block in zip(came, put, strict=True)
        )
        reader.touch(block.id for block in put)
        assert reader.flush(10.0).is_empty
    for tier in (right, wrong):
        tier.block_store.sweep()  # within a week, which is how long blocks stay, there is nothing to sweep
        assert match_of(tier, first).num_tokens == match_of(tier, second).num_tokens == 1024
        assert tier.usage().counters["missed"] == {}
        tier.close()


@pytest.mark.parametrize(("ahead_s", "left_tokens"), [(2 * DAY_S, 0), (-2 * DAY_S, 1024)])
def test_sweep_with_a_clock_ahead_expires_blocks_early(store_url: str, ahead_s: float, left_tokens: int) -> None:
    """Where servers sweep: Valkey goes by a clock of its own. What is gone is written again."""
    right, wrong = open_remote(store_url, ttl_s=DAY_S), open_remote(store_url, ttl_s=DAY_S, ahead_s=ahead_s)
    ids = ids_of(43, 1024)
    put_chain(right, ids)
    wrong.block_store.sweep()

    assert match_of(right, ids).num_tokens == (1024 if store_url.startswith("redis") else left_tokens)
    put_chain(right, ids)
    # In a folder, what has expired by a server's own clock is not there for that server.
    assert match_of(wrong, ids).num_tokens == (left_tokens if store_url.startswith("file") else 1024)
    for tier in (right, wrong):
        tier.close()


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
def test_touch_with_a_skewed_clock_keeps_the_block(store_url: str, ahead_s: float) -> None:
    """An object is written again by a server that takes it for old; others keep a time of their own."""
    tier = open_remote(store_url, ttl_s=3 * DAY_S, ahead_s=ahead_s)
    ids = ids_of(44, 512)
    put = put_chain(tier, ids)
    tier.touch(BlockId(block.key) for block in put)
    assert tier.flush(10.0).is_empty
    came = read_all(tier, [block.id for block in put])

    assert all(isinstance(back, LoadedBlock) and same(back.block, block) for back, block in zip(came, put, strict=True))
    tier.close()


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
def test_engine_with_a_skewed_clock_resumes_the_conversation(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    secret, replies = secret_file(tmp_path), []
    with engine_on(redis_url, tiny_loaded("llama"), secret) as first:
        say(first, "one", PROMPT, 4)
        share(first)
    now = time.time
    for shift_s in (0.0, ahead_s):
        shifted = partial(RemoteTier, clock=lambda shift_s=shift_s: now() + shift_s)
        monkeypatch.setattr(build, "RemoteTier", shifted)
        monkeypatch.setattr(time, "time", lambda shift_s=shift_s: now() + shift_s)
        with engine_on(redis_url, tiny_loaded("llama"), secret) as other:
            replies.append(say(other, "two", (*PROMPT, 1, 2, 3), 8))
        monkeypatch.undo()

    assert [cached(each) for each in replies] == [512, 512]
    assert replies[0].ids == replies[1].ids
