"""What a conversation is on the disk: one chain of blocks, whatever becomes of its spans in memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstrata.layers.kinds import Layout
from kvstrata.store.store import MAX_SPANS, Store
from tests.disk.blocks import rows_of
from tests.store.disk import chat, load, random_tokens, reachable, store_on, write_turns, written
from tests.store.kv import HYBRID, LAYOUT, check_lease

NUM_TURNS = 3 * MAX_SPANS
LAYOUTS = [pytest.param(LAYOUT, id="full"), pytest.param(HYBRID, id="hybrid")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_chat_is_written_once(layout: Layout, tmp_path: Path) -> None:
    with store_on(tmp_path, layout, write_through=True) as store:
        tokens = chat(store, [], NUM_TURNS)
        assert len(store.entries) <= MAX_SPANS
        assert written(store) == reachable(store, tokens) == len(tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_restart_a_chat_goes_on_where_its_blocks_end(layout: Layout, tmp_path: Path) -> None:
    with store_on(tmp_path, layout, write_through=True) as store:
        tokens = chat(store, [], MAX_SPANS)
        written(store)
    with store_on(tmp_path, layout, write_through=True) as store:
        load(store, tokens)
        tokens = chat(store, tokens, MAX_SPANS, seed=1)
        assert written(store) == reachable(store, tokens) == len(tokens)


def test_what_was_cut_short_in_memory_is_not_written_again(tmp_path: Path) -> None:
    """The cut is somewhere in a block, and so is the beginning of what is loaded after it."""
    with store_on(tmp_path, write_through=True) as store:
        tokens = chat(store, chat(store, [], 1, turn_tokens=100), 1, seed=1, turn_tokens=2000)
        store.release(store.match(tokens, ""))
        store.shrink_to(store.held_bytes - 10)
        assert store.find(tokens, "").num_tokens == 100 + 1536
        load(store, tokens)
        tokens = chat(store, tokens, 2, seed=2)
        assert written(store) == reachable(store, tokens) == len(tokens)


def test_a_chat_that_parts_shares_what_comes_before(tmp_path: Path) -> None:
    with store_on(tmp_path, HYBRID, write_through=True) as store:
        tokens = chat(store, [], 10, turn_tokens=100)
        other = chat(store, tokens[:400], 1, seed=1, turn_tokens=100)
        tokens = chat(store, tokens, 10, seed=2, turn_tokens=100)
        other = chat(store, other, 10, seed=3, turn_tokens=100)
        assert reachable(store, tokens) == len(tokens)
        assert reachable(store, other) == len(other)
        # A block at most twice, where they part.
        assert written(store) <= len(tokens) + len(other) - 400 + 256


def await_rows(store: Store, num_blocks: int) -> None:
    """A catalogue that was lost is rebuilt while the server answers."""
    deadline = time.monotonic() + 30
    while store.cold.tier.usage().num_blocks < num_blocks and time.monotonic() < deadline:
        time.sleep(0.005)
    assert store.cold.tier.usage().num_blocks == num_blocks


def test_the_longest_of_several_chains_is_continued(tmp_path: Path) -> None:
    """A folder may have a conversation more than once, cut into other blocks."""
    tokens = random_tokens(900, 0)
    with store_on(tmp_path / "a") as store:
        write_turns(store, tokens, [300])
    with store_on(tmp_path / "b") as store:
        write_turns(store, tokens, [100, 200, 700])
    for block in (tmp_path / "b").rglob("*.safetensors"):
        there = tmp_path / "a" / block.relative_to(tmp_path / "b")
        there.parent.mkdir(exist_ok=True)
        block.rename(there)
    for catalogue in (tmp_path / "a").glob("catalogue*"):
        catalogue.unlink()
    with store_on(tmp_path / "a") as store:
        await_rows(store, len(list((tmp_path / "a").rglob("*.safetensors"))))
        write_turns(store, tokens, [900])
        assert reachable(store, tokens) == 900
        assert written(store) == 300 + 700 + 200
        store.clear(tier="hot")
        load(store, tokens)
        lease = store.match(tokens, "")
        check_lease(lease, tokens)
        assert lease.num_tokens == 900


def test_a_block_that_is_missing_is_written_and_the_rest_hangs_on_it(tmp_path: Path) -> None:
    with store_on(tmp_path, write_through=True) as store:
        tier = store.cold.tier
        tokens = chat(store, [], 1, turn_tokens=2000)
        written(store)
        tier.remove([row.id for row in rows_of(tier) if row.start == 512])
        assert reachable(store, tokens) == 512
        tokens = chat(store, tokens, 1, seed=1)
        assert written(store) == reachable(store, tokens) == len(tokens)
