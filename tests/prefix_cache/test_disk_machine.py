"""Whatever happens to conversations in memory, what was stored is there or on the disk, and hardly any of it twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.prefix_cache.config import DiskWrite
from kvstrata.prefix_cache.keys import as_ids
from kvstrata.prefix_cache.prefix_cache import Stock
from kvstrata.prefix_cache.radix_tree import RadixTree
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.spans.plan import make_plan
from tests.prefix_cache.disk import load, random_tokens, reachable, store_on, written
from tests.prefix_cache.kv import LAYOUT, Run, check_lease, settle, store_tokens

NUM_STEPS = 40
ROOT = b"root"
MOVES = ["turn"] * 6 + ["part"] * 2 + ["beside"] * 2 + ["work"] * 4 + ["shrink"] * 3 + ["load"] * 2
MOVES += ["settle", "spill", "flush", "lower"]


class Conversations:
    def __init__(self, stock: Stock, seed: int) -> None:
        self.stock = stock
        self.source = random.Random(seed)
        self.stored: list[list[int]] = []
        self.tree: RadixTree[None] = RadixTree()

    def move(self) -> None:
        move = self.source.choice(MOVES if self.stored else ["turn"])
        getattr(self, move)()

    def turn(self) -> None:
        """One goes on, or a new one begins."""
        self.keep(self.longer(self.source.choice([[], *self.stored])))

    def part(self) -> None:
        """A user edits what was said before."""
        tokens = self.source.choice(self.stored)
        self.keep(self.longer(tokens[: self.source.randrange(1, len(tokens) + 1)]))

    def beside(self) -> None:
        """One ends while what it goes on from still runs."""
        run = Run(self.stock, self.longer(self.source.choice(self.stored)))
        run.compute(self.source.randrange(1, run.left + 1))
        run.seal()
        self.keep(self.longer(list(run.tokens[: run.num_computed])))
        run.compute(run.left)
        run.end()
        self.note(list(run.tokens))

    def work(self) -> None:
        for _ in range(self.source.randrange(1, 12)):
            if self.stock.background.has_work:
                self.stock.background.run_background(0)

    def shrink(self) -> None:
        most_bytes = int(self.stock.table.nbytes * self.source.choice([0, 0.3, 0.7, 0.95]))
        self.stock.reclaimer.shrink_to(most_bytes, 0.0, most_bytes=most_bytes)

    def load(self) -> None:
        tokens = self.source.choice(self.stored)
        if reachable(self.stock, tokens) > self.stock.store.lookup(tokens, "").num_tokens:
            load(self.stock, tokens)

    def settle(self) -> None:
        settle(self.stock)

    def spill(self) -> None:
        self.stock.offloader.offer_changed()

    def flush(self) -> None:
        self.stock.flush(60)

    def lower(self) -> None:
        name = self.source.choice(["raw", "planes:8"])
        self.stock.requantizer.requantize(
            PrecisionChange(k=parse(name), v=parse(name)), make_plan(LAYOUT, parse(name), parse(name))
        )

    def longer(self, tokens: list[int]) -> list[int]:
        return [*tokens, *random_tokens(self.source.choice([5, 40, 100, 300, 700]), self.source.randrange(1 << 30))]

    def keep(self, tokens: list[int]) -> None:
        store_tokens(self.stock, tokens)
        self.note(tokens)

    def note(self, tokens: list[int]) -> None:
        self.stored.append(tokens)
        self.tree.insert(ROOT, as_ids(tokens), None)

    def check(self, tokens: list[int]) -> None:
        lease = self.stock.store.lease(tokens, "")
        check_lease(lease, tokens)
        self.stock.store.release(lease)
        assert max(lease.num_tokens, self.on_disk(tokens)) == len(tokens)

    def on_disk(self, tokens: list[int]) -> int:
        """One that ends inside a block is there with one that goes on."""
        longer = (each for each in self.stored if each[: len(tokens)] == tokens)
        return max(min(len(tokens), reachable(self.stock, each)) for each in longer)


@pytest.mark.parametrize("disk_write", ["at-eviction", "after-reply"])
@pytest.mark.parametrize("seed", range(2))
def test_what_was_stored_stays(seed: int, disk_write: DiskWrite, tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write=disk_write) as stock:
        conversations = Conversations(stock, seed)
        for _ in range(NUM_STEPS):
            conversations.move()
            for tokens in conversations.source.choices(conversations.stored, k=2):
                conversations.check(tokens)
        stock.flush(60)
        assert all(conversations.on_disk(tokens) == len(tokens) for tokens in conversations.stored)
        assert stock.counters["refused_spills"] == 0
        # A block more where two part, or where one was cut short.
        assert written(stock) <= 1.3 * conversations.tree.num_tokens
