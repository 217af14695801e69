"""What a conversation is on the disk: one chain of blocks, whatever becomes of its spans in memory."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvstrata.index.identity import Identity, root_key
from kvstrata.index.ids import as_ids
from kvstrata.index.keys import chain
from kvstrata.layers.kinds import Layout
from kvstrata.spans.contents import tally
from kvstrata.spans.plan import make_plan
from kvstrata.store.cold import Cold
from kvstrata.store.precision import PrecisionOptions
from kvstrata.store.store import MAX_SPANS, Store, StoreOptions
from kvstrata.tiers.disk import DiskTier
from tests.store.kv import HYBRID, LAYOUT, Clock, check_lease, settle, store_tokens

MIB = 1 << 20
NUM_TURNS = 3 * MAX_SPANS
LOAD_TIMEOUT_S = 60.0
LAYOUTS = [pytest.param(LAYOUT, id="full"), pytest.param(HYBRID, id="hybrid")]


def identity_of(layout: Layout) -> Identity:
    return Identity("weights", "float32", tuple(spec.signature for spec in layout.flat()))


@contextmanager
def store_on(folder: Path, layout: Layout = LAYOUT, name: str = "raw", **options: object) -> Iterator[Store]:
    tier = DiskTier(folder, 256 * MIB, chain=chain, tally=tally, queue_bytes=64 * MIB, reserve_bytes=0)
    plan_of = partial(make_plan, layout)
    made = StoreOptions(hot_bytes=1 << 30, precision=PrecisionOptions(min_quantize_tokens=0), **options)  # pyright: ignore[reportArgumentType]
    cold = Cold(tier, layout, post=lambda _: None)
    yield Store(layout, identity_of(layout), plan_of(name, name), made, plan_of=plan_of, cold=cold, clock=Clock())
    tier.close()


def random_tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000) for _ in range(count)]


def chat(store: Store, tokens: list[int], num_turns: int, *, seed: int = 0, turn_tokens: int = 40) -> list[int]:
    """So many more turns, each settled before the next comes."""
    for turn in range(num_turns):
        tokens = [*tokens, *random_tokens(turn_tokens, 1000 * seed + turn)]
        store_tokens(store, tokens)
        settle(store)
    return tokens


def write_turns(store: Store, tokens: list[int], ends: list[int]) -> None:
    for end in ends:
        store_tokens(store, tokens[:end])
        settle(store)
    store.spill()
    settle(store)
    written(store)


def written(store: Store) -> int:
    """Tokens on the disk, over all chains."""
    assert store.cold is not None
    assert store.cold.tier.flush(60).is_empty
    return store.cold.tier.usage().num_tokens


def reachable(store: Store, tokens: list[int]) -> int:
    """How many a start would find."""
    assert store.cold is not None
    return store.cold.match(root_key(store._identity, ""), as_ids(tokens)).num_tokens


def load(store: Store, tokens: list[int]) -> None:
    """What the disk has comes back."""
    loading = store.look_on_disk(tokens, "", lambda _: True)
    assert loading is not None
    until_s = time.monotonic() + LOAD_TIMEOUT_S
    while not loading.is_done:
        assert time.monotonic() < until_s
        store.work(0)
    store.promote(loading)


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
        write_turns(store, tokens, [900])
        assert reachable(store, tokens) == 900
        assert written(store) == 300 + 700 + 200
        store.clear(tier="hot")
        load(store, tokens)
        lease = store.match(tokens, "")
        check_lease(lease, tokens)
        assert lease.num_tokens == 900
