"""Chains of blocks: a conversation is one chain on the disk, however its spans change in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.kv.layout import Layout
from kvstrata.prefix_cache.transcode import MAX_SPANS
from tests.prefix_cache.disk import chat, load, random_tokens, reachable, store_on, write_turns, written
from tests.prefix_cache.kv import HYBRID, LAYOUT, Run, check_lease, settle, store_tokens
from tests.support.eventually import eventually
from tests.tiers.disk.blocks import records_of

NUM_TURNS = 3 * MAX_SPANS
LAYOUTS = [pytest.param(LAYOUT, id="full"), pytest.param(HYBRID, id="hybrid")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chain_writer_long_chat_is_written_once(layout: Layout, tmp_path: Path) -> None:
    with store_on(tmp_path, layout, disk_write="after_reply") as cache:
        tokens = chat(cache, [], NUM_TURNS)
        assert len(cache.table.entries) <= MAX_SPANS
        assert written(cache) == reachable(cache, tokens) == len(tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chain_writer_after_restart_continues_written_blocks(layout: Layout, tmp_path: Path) -> None:
    with store_on(tmp_path, layout, disk_write="after_reply") as cache:
        tokens = chat(cache, [], MAX_SPANS)
        written(cache)
    with store_on(tmp_path, layout, disk_write="after_reply") as cache:
        load(cache, tokens)
        tokens = chat(cache, tokens, MAX_SPANS, seed=1)
        assert written(cache) == reachable(cache, tokens) == len(tokens)


def test_chain_writer_cut_and_reloaded_span_is_not_rewritten(tmp_path: Path) -> None:
    """Both the cut and the start of the loaded span are inside a block."""
    with store_on(tmp_path, disk_write="after_reply") as cache:
        tokens = chat(cache, chat(cache, [], 1, turn_tokens=100), 1, seed=1, turn_tokens=2000)
        cache.release(cache.lease(tokens, ""))
        cache.reclaimer.shrink_to(cache.table.nbytes - 10)
        assert cache.lookup(tokens, "").num_tokens == 100 + 1536
        load(cache, tokens)
        tokens = chat(cache, tokens, 2, seed=2)
        assert written(cache) == reachable(cache, tokens) == len(tokens)


def test_chain_writer_diverged_chats_share_their_prefix(tmp_path: Path) -> None:
    with store_on(tmp_path, HYBRID, disk_write="after_reply") as cache:
        tokens = chat(cache, [], 10, turn_tokens=100)
        other = chat(cache, tokens[:400], 1, seed=1, turn_tokens=100)
        tokens = chat(cache, tokens, 10, seed=2, turn_tokens=100)
        other = chat(cache, other, 10, seed=3, turn_tokens=100)
        assert reachable(cache, tokens) == len(tokens)
        assert reachable(cache, other) == len(other)
        # The block in which the chats diverge may be written twice.
        assert written(cache) <= len(tokens) + len(other) - 400 + 256


def test_chain_writer_with_several_chains_continues_the_longest(tmp_path: Path) -> None:
    """A folder may have several chains of one conversation, cut into different blocks."""
    tokens = random_tokens(900, 0)
    with store_on(tmp_path / "a") as cache:
        write_turns(cache, tokens, [300])
    with store_on(tmp_path / "b") as cache:
        write_turns(cache, tokens, [100, 200, 700])
    for block in (tmp_path / "b").rglob("*.safetensors"):
        there = tmp_path / "a" / block.relative_to(tmp_path / "b")
        there.parent.mkdir(exist_ok=True)
        block.rename(there)
    for catalogue in (tmp_path / "a").glob("catalogue*"):
        catalogue.unlink()
    with store_on(tmp_path / "a") as cache:
        # The tier rebuilds its lost catalogue.
        num_blocks = len(list((tmp_path / "a").rglob("*.safetensors")))
        eventually(lambda: cache.disk.tier.usage().num_blocks == num_blocks, 30)
        write_turns(cache, tokens, [900])
        assert reachable(cache, tokens) == 900
        assert written(cache) == 300 + 700 + 200
        cache.evictor.clear(tier="hot")
        load(cache, tokens)
        lease = cache.lease(tokens, "")
        check_lease(lease, tokens)
        assert lease.num_tokens == 900


def test_chain_writer_missing_block_is_rewritten_and_its_children_stay(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after_reply") as cache:
        tier = cache.disk.tier
        tokens = chat(cache, [], 1, turn_tokens=2000)
        written(cache)
        tier.remove([row.id for row in records_of(tier) if row.start == 512])
        assert reachable(cache, tokens) == 512
        tokens = chat(cache, tokens, 1, seed=1)
        assert written(cache) == reachable(cache, tokens) == len(tokens)


def test_offloader_child_of_running_entry_is_written_after_its_end(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after_reply") as cache:
        shared = random_tokens(300, 0)
        running = Run(cache, [*shared, *random_tokens(50, 1)])
        running.compute(running.left)
        running.seal()
        other = [*shared, *random_tokens(50, 2)]
        store_tokens(cache, other)
        settle(cache)
        assert written(cache) == 0
        running.end()
        settle(cache)
        written(cache)
        assert reachable(cache, other) == len(other)


def test_offloader_leased_reply_is_written(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after_reply") as cache:
        tokens = random_tokens(300, 0)
        store_tokens(cache, tokens)
        running = Run(cache, [*tokens, 1, 2])
        settle(cache)
        assert written(cache) == reachable(cache, tokens) == len(tokens)
        running.compute(running.left)
        running.end()
