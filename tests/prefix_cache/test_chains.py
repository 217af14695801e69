"""Chains of blocks: a conversation is one chain on the disk, however its spans change in memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstrata.layers.kinds import Layout
from kvstrata.prefix_cache.prefix_cache import Stock
from kvstrata.prefix_cache.transcode import MAX_SPANS
from tests.disk.blocks import rows_of
from tests.prefix_cache.disk import chat, load, random_tokens, reachable, store_on, write_turns, written
from tests.prefix_cache.kv import HYBRID, LAYOUT, Run, check_lease, settle, store_tokens

NUM_TURNS = 3 * MAX_SPANS
LAYOUTS = [pytest.param(LAYOUT, id="full"), pytest.param(HYBRID, id="hybrid")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chain_writer_long_chat_is_written_once(layout: Layout, tmp_path: Path) -> None:
    with store_on(tmp_path, layout, disk_write="after-reply") as stock:
        tokens = chat(stock, [], NUM_TURNS)
        assert len(stock.table.entries) <= MAX_SPANS
        assert written(stock) == reachable(stock, tokens) == len(tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chain_writer_after_restart_continues_written_blocks(layout: Layout, tmp_path: Path) -> None:
    with store_on(tmp_path, layout, disk_write="after-reply") as stock:
        tokens = chat(stock, [], MAX_SPANS)
        written(stock)
    with store_on(tmp_path, layout, disk_write="after-reply") as stock:
        load(stock, tokens)
        tokens = chat(stock, tokens, MAX_SPANS, seed=1)
        assert written(stock) == reachable(stock, tokens) == len(tokens)


def test_chain_writer_cut_and_reloaded_span_is_not_rewritten(tmp_path: Path) -> None:
    """Both the cut and the start of the loaded span are inside a block."""
    with store_on(tmp_path, disk_write="after-reply") as stock:
        tokens = chat(stock, chat(stock, [], 1, turn_tokens=100), 1, seed=1, turn_tokens=2000)
        stock.store.release(stock.store.lease(tokens, ""))
        stock.reclaimer.shrink_to(stock.table.nbytes - 10)
        assert stock.store.lookup(tokens, "").num_tokens == 100 + 1536
        load(stock, tokens)
        tokens = chat(stock, tokens, 2, seed=2)
        assert written(stock) == reachable(stock, tokens) == len(tokens)


def test_chain_writer_diverged_chats_share_their_prefix(tmp_path: Path) -> None:
    with store_on(tmp_path, HYBRID, disk_write="after-reply") as stock:
        tokens = chat(stock, [], 10, turn_tokens=100)
        other = chat(stock, tokens[:400], 1, seed=1, turn_tokens=100)
        tokens = chat(stock, tokens, 10, seed=2, turn_tokens=100)
        other = chat(stock, other, 10, seed=3, turn_tokens=100)
        assert reachable(stock, tokens) == len(tokens)
        assert reachable(stock, other) == len(other)
        # The block in which the chats diverge may be written twice.
        assert written(stock) <= len(tokens) + len(other) - 400 + 256


def await_rows(stock: Stock, num_blocks: int) -> None:
    """Wait until the tier has rebuilt its lost catalogue."""
    deadline = time.monotonic() + 30
    while stock.disk.tier.usage().num_blocks < num_blocks and time.monotonic() < deadline:
        time.sleep(0.005)
    assert stock.disk.tier.usage().num_blocks == num_blocks


def test_chain_writer_with_several_chains_continues_the_longest(tmp_path: Path) -> None:
    """A folder may have several chains of one conversation, cut into different blocks."""
    tokens = random_tokens(900, 0)
    with store_on(tmp_path / "a") as stock:
        write_turns(stock, tokens, [300])
    with store_on(tmp_path / "b") as stock:
        write_turns(stock, tokens, [100, 200, 700])
    for block in (tmp_path / "b").rglob("*.safetensors"):
        there = tmp_path / "a" / block.relative_to(tmp_path / "b")
        there.parent.mkdir(exist_ok=True)
        block.rename(there)
    for catalogue in (tmp_path / "a").glob("catalogue*"):
        catalogue.unlink()
    with store_on(tmp_path / "a") as stock:
        await_rows(stock, len(list((tmp_path / "a").rglob("*.safetensors"))))
        write_turns(stock, tokens, [900])
        assert reachable(stock, tokens) == 900
        assert written(stock) == 300 + 700 + 200
        stock.evictor.clear(tier="hot")
        load(stock, tokens)
        lease = stock.store.lease(tokens, "")
        check_lease(lease, tokens)
        assert lease.num_tokens == 900


def test_chain_writer_missing_block_is_rewritten_and_its_children_stay(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after-reply") as stock:
        tier = stock.disk.tier
        tokens = chat(stock, [], 1, turn_tokens=2000)
        written(stock)
        tier.remove([row.id for row in rows_of(tier) if row.start == 512])
        assert reachable(stock, tokens) == 512
        tokens = chat(stock, tokens, 1, seed=1)
        assert written(stock) == reachable(stock, tokens) == len(tokens)


def test_offloader_child_of_running_entry_is_written_after_its_end(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after-reply") as stock:
        shared = random_tokens(300, 0)
        running = Run(stock, [*shared, *random_tokens(50, 1)])
        running.compute(running.left)
        running.seal()
        other = [*shared, *random_tokens(50, 2)]
        store_tokens(stock, other)
        settle(stock)
        assert written(stock) == 0
        running.end()
        settle(stock)
        written(stock)
        assert reachable(stock, other) == len(other)


def test_offloader_leased_reply_is_written(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after-reply") as stock:
        tokens = random_tokens(300, 0)
        store_tokens(stock, tokens)
        running = Run(stock, [*tokens, 1, 2])
        settle(stock)
        assert written(stock) == reachable(stock, tokens) == len(tokens)
        running.compute(running.left)
        running.end()
