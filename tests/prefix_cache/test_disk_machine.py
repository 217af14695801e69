"""State machine of a cache with a disk: no cached token is lost, and few are written twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.kv.precision_plan import make_plan
from kvstrata.prefix_cache.config import DiskWrite
from kvstrata.prefix_cache.keys import as_ids
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.radix_tree import RadixTree
from kvstrata.prefix_cache.requantize import PrecisionChange
from tests.prefix_cache.disk import load, random_tokens, reachable, store_on, written
from tests.prefix_cache.kv import LAYOUT, Run, check_lease, settle, store_tokens

NUM_STEPS = 40
ROOT = b"root"
MOVES = (
    ["turn"] * 6 + ["diverge"] * 2 + ["continue_running"] * 2 + ["run_background"] * 4 + ["shrink"] * 3 + ["load"] * 2
)
MOVES += ["settle", "offload", "flush", "requantize"]


class ConversationMoves:
    """Random operations on a cache, and the tokens that it must still have after each."""

    def __init__(self, prefix_cache: PrefixCache, seed: int) -> None:
        self.prefix_cache = prefix_cache
        self.source = random.Random(seed)
        self.cached: list[list[int]] = []
        self.tree: RadixTree[None] = RadixTree()

    def make_move(self) -> None:
        move = self.source.choice(MOVES if self.cached else ["turn"])
        getattr(self, move)()

    def turn(self) -> None:
        """Continue a conversation, or begin one."""
        self.cache_tokens(self.longer(self.source.choice([[], *self.cached])))

    def diverge(self) -> None:
        """Edit an earlier message of a conversation."""
        tokens = self.source.choice(self.cached)
        self.cache_tokens(self.longer(tokens[: self.source.randrange(1, len(tokens) + 1)]))

    def continue_running(self) -> None:
        """Finish a request while the request that it continues still runs."""
        run = Run(self.prefix_cache, self.longer(self.source.choice(self.cached)))
        run.compute(self.source.randrange(1, run.left + 1))
        run.seal()
        self.cache_tokens(self.longer(list(run.tokens[: run.num_computed])))
        run.compute(run.left)
        run.end()
        self.record_tokens(list(run.tokens))

    def run_background(self) -> None:
        for _ in range(self.source.randrange(1, 12)):
            if self.prefix_cache.has_work:
                self.prefix_cache.run_background(0)

    def shrink(self) -> None:
        most_bytes = int(self.prefix_cache.table.nbytes * self.source.choice([0, 0.3, 0.7, 0.95]))
        self.prefix_cache.reclaimer.shrink_to(most_bytes, 0.0, hard_limit_bytes=most_bytes)

    def load(self) -> None:
        tokens = self.source.choice(self.cached)
        if reachable(self.prefix_cache, tokens) > self.prefix_cache.lookup(tokens, "").num_tokens:
            load(self.prefix_cache, tokens)

    def settle(self) -> None:
        settle(self.prefix_cache)

    def offload(self) -> None:
        self.prefix_cache.offloader.offer_changed()

    def flush(self) -> None:
        self.prefix_cache.flush(60)

    def requantize(self) -> None:
        name = self.source.choice(["raw", "planes:8"])
        self.prefix_cache.requantizer.requantize(
            PrecisionChange(k=parse(name), v=parse(name)), make_plan(LAYOUT, parse(name), parse(name))
        )

    def longer(self, tokens: list[int]) -> list[int]:
        return [*tokens, *random_tokens(self.source.choice([5, 40, 100, 300, 700]), self.source.randrange(1 << 30))]

    def cache_tokens(self, tokens: list[int]) -> None:
        store_tokens(self.prefix_cache, tokens)
        self.record_tokens(tokens)

    def record_tokens(self, tokens: list[int]) -> None:
        self.cached.append(tokens)
        self.tree.insert(ROOT, as_ids(tokens), None)

    def check_tokens(self, tokens: list[int]) -> None:
        lease = self.prefix_cache.lease(tokens, "")
        check_lease(lease, tokens)
        self.prefix_cache.release(lease)
        assert max(lease.num_tokens, self.tokens_on_disk(tokens)) == len(tokens)

    def tokens_on_disk(self, tokens: list[int]) -> int:
        """Count the tokens on the disk; those that end inside a block may be there as part of a longer conversation."""
        longer = (each for each in self.cached if each[: len(tokens)] == tokens)
        return max(min(len(tokens), reachable(self.prefix_cache, each)) for each in longer)


@pytest.mark.parametrize("disk_write", ["on_evict", "after_reply"])
@pytest.mark.parametrize("seed", range(2))
def test_cache_with_disk_random_operations_lose_no_token(seed: int, disk_write: DiskWrite, tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write=disk_write) as prefix_cache:
        conversations = ConversationMoves(prefix_cache, seed)
        for _ in range(NUM_STEPS):
            conversations.make_move()
            for tokens in conversations.source.choices(conversations.cached, k=2):
                conversations.check_tokens(tokens)
        prefix_cache.flush(60)
        assert all(conversations.tokens_on_disk(tokens) == len(tokens) for tokens in conversations.cached)
        assert prefix_cache.counters["refused_spills"] == 0
        # Divergence and cuts may each cost one more block.
        assert written(prefix_cache) <= 1.3 * conversations.tree.num_tokens
