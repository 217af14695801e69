"""Random requests over a tier whose answers are forged: late, missing, wrong or withdrawn, on a real model.

Prefixes shrink between plan and start, requests are cancelled, sequences are preempted and resumed. Whatever happens,
each request ends with the tokens of an engine without a cache, and leaves nothing behind but cached KV.
"""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import pytest

from kvstrata.engine import prefix_lookup
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.prefix_lookup import MAX_TIER_LOOKUPS
from kvstrata.engine.sequence import Sequence as EngineSequence
from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import BASE, BLOCK_TOKENS, CHECKPOINT, Block, BlockId
from kvstrata.tiers.interface import (
    Accepted,
    BlockRemoval,
    ChainLink,
    NoBlocks,
    NoTier,
    Refusal,
    Refused,
    RemovalCause,
    Removed,
    TierMatch,
    TokenIds,
    WriteState,
)
from kvstrata.tiers.lookups import Lookup, Walk
from kvstrata.tiers.read_pool import BlockReading, Deliver, LoadedBlock, MissingBlock, MissReason
from tests.engine.drive import Client, Drive, do_one_step
from tests.engine.test_loop import prompt
from tests.engine.test_prefixes import DRAWN, settle, steady_loaded

T = TypeVar("T")

# wrong  offers one more block, which is not there
ANSWERS = ("now", "now", "now", "late", "never", "wrong", "withdrawn")
READS = ("now", "now", "now", "late", "never", "missing", "unreadable")

# Prompts that share beginnings, some of them longer than two blocks.
LONG = prompt(600, seed=1)
PROMPTS = (LONG, LONG[:300], LONG[:530], LONG[:280] + prompt(260, seed=2), prompt(150, seed=3), prompt(180, seed=4))
# Prompts that no tier has.
NEW_PROMPTS = (prompt(100, seed=5), prompt(400, seed=6))
REPLY_TOKENS = (2, 80)
KV_TOKENS = 720
SUBMIT_SHARE = 0.5
FULL_SHARE = 0.2
PATIENCE_S = 0.2
MAX_RUN_S = 20.0


@dataclass(frozen=True)
class SentRequest:
    """Request, and the reply that it gets from an engine without a cache."""

    client: Client
    expected_ids: list[int]
    sequence: weakref.ref[EngineSequence]


class ForgedBlocks(NoBlocks):
    """Blocks in memory, in chains."""

    def __init__(self, blocks: Mapping[BlockId, Block]) -> None:
        self.held = dict(blocks)
        self.offers_too_much = False

    def find(self, key: bytes, part: str = BASE) -> int:
        block = self.held.get(BlockId(key, part))
        return 0 if block is None else max(1, block.nbytes)

    def num_children(self, key: bytes) -> int:
        return sum(block.parent == key for block in self.held.values())

    def longest_chain(self, parent: bytes, start: int, ids: TokenIds, *, at_marks: bool = False) -> Walk[TierMatch]:
        yield
        best = TierMatch()
        for links in self._chains(parent, start, ids):
            mark_bytes = self.find(links[-1].key, CHECKPOINT) if at_marks else 0
            if links[-1].end > best.num_tokens and (mark_bytes or not at_marks):
                best = TierMatch(links, mark_bytes)
        end = best.num_tokens + BLOCK_TOKENS
        if self.offers_too_much and best.num_tokens >= start and end <= len(ids):
            parent = best.links[-1].key if best.links else parent
            missing = ChainLink(chain(parent, ids[best.num_tokens : end]), parent, best.num_tokens, end, 1000)
            best = TierMatch((*best.links, missing), 1000 if at_marks else 0)
        return best

    def _chains(self, parent: bytes, start: int, ids: TokenIds) -> Iterator[tuple[ChainLink, ...]]:
        lengths = {block.num_tokens for block in self.held.values() if block.parent == parent and block.part == BASE}
        for end in (start + length for length in lengths if start + length <= len(ids)):
            key = chain(parent, ids[start:end])
            if nbytes := self.find(key):
                link = ChainLink(key, parent, start, end, nbytes)
                yield (link,)
                yield from ((link, *rest) for rest in self._chains(key, end, ids))


class ForgedTier(NoTier):
    """Tier in memory. `answers` and `reads` say what happens to the next lookups and reads; `is_full`: it takes no
    blocks."""

    limit_bytes = 1 << 30
    read_ahead_bytes = 1 << 20

    def __init__(self, blocks: Mapping[BlockId, Block]) -> None:
        super().__init__()
        self.blocks = ForgedBlocks(blocks)
        self.answers = self.reads = "now"
        self.is_full = False
        self.num_lookups = 0
        self.readings: list[BlockReading] = []
        self._late: list[Callable[[], None]] = []

    def release_late(self) -> None:
        """Give all answers and blocks that are late."""
        late, self._late = self._late, []
        for give in late:
            give()

    def write_state(self) -> WriteState:
        return WriteState(queue_bytes=1000 if self.is_full else 0, limit_bytes=1000)

    def start_lookup(self, walk: Walk[T], fallback: T, on_answer: Callable[[], None]) -> Lookup[T]:
        lookup = Lookup(walk, fallback, time.monotonic(), on_answer)
        self.num_lookups += 1
        self._give(self.answers, self._answer_wrong(lookup) if self.answers == "wrong" else lookup.run, lookup.end)
        return lookup

    def _answer_wrong(self, lookup: Lookup[T]) -> Callable[[], None]:
        def answer() -> None:
            self.blocks.offers_too_much = True
            lookup.run()
            self.blocks.offers_too_much = False

        return answer

    def _give(self, fate: str, give: Callable[[], None], withdraw: Callable[[], None]) -> None:
        if fate == "late":
            self._late.append(give)
        elif fate == "withdrawn":
            withdraw()
        elif fate != "never":
            give()

    def put(self, block: Block, *, replace: bool = False, **_: object) -> Accepted | Refused:
        if block.id in self.blocks.held and not replace:
            return Refused(Refusal.PRESENT, block.nbytes)
        if self.is_full:
            return Refused(Refusal.QUEUE_FULL, block.nbytes)
        self.blocks.held[block.id] = block
        return Accepted()

    def read(
        self, blocks: Sequence[BlockId], deliver: Deliver, *, root: bytes, sizes: Sequence[int] | None = None
    ) -> BlockReading:
        reading = BlockReading(blocks, root, deliver, sizes or [0] * len(blocks))
        self.readings.append(reading)
        results = [self._result(id_) for id_ in blocks]

        def give() -> None:
            for index, result in enumerate(results):
                reading.give(index, result)

        self._give(self.reads, give, reading.cancel)
        return reading

    def _result(self, id_: BlockId) -> LoadedBlock | MissingBlock:
        block = self.blocks.held.get(id_)
        if block is None or self.reads == "missing":
            return MissingBlock(id_, MissReason.ABSENT)
        return LoadedBlock(replace(block, description={}) if self.reads == "unreadable" else block)

    def remove(self, blocks: Sequence[BlockId], *, durable: bool = False) -> Removed:
        del durable
        return Removed(sum(self.blocks.held.pop(id_, None) is not None for id_ in blocks))

    def lose_block(self, which: int) -> None:
        """Lose a block, as a disk that evicts or finds it damaged."""
        if self.blocks.held:
            block = list(self.blocks.held.values())[which % len(self.blocks.held)]
            del self.blocks.held[block.id]
            self.removals.add(
                [BlockRemoval(block.id, block.start, block.start + block.num_tokens, RemovalCause.EVICTED)]
            )


def new_drive(architecture: str, tier: ForgedTier) -> Drive:
    """Return an engine core with memory for about one long prompt, whose work does not depend on time."""
    loaded = steady_loaded(architecture)
    limits = EngineLimits(max_running=4, buffer_step_tokens=16, prefill_chunk_tokens=256)
    kv_bytes = Drive(loaded).budget.bytes_for(KV_TOKENS)
    drive = Drive(loaded, limits, kv_bytes=kv_bytes, tier=tier, patience_s=PATIENCE_S)
    drive.core.memory.keeps_growth_free = False  # so that sequences are preempted
    do_one_step(drive.core.pacer)
    return drive


@cache
def written_blocks(architecture: str) -> dict[BlockId, Block]:
    """Return the blocks of the long prompts, as a tier has them."""
    tier = ForgedTier({})
    drive = new_drive(architecture, tier)
    for tokens in PROMPTS[:4]:
        drive.submit(tokens, 2)
        drive.run()
        drive.prefix_cache.offloader.offer_changed()
        settle(drive)
    return tier.blocks.held


@cache
def uncached_ids(architecture: str, tokens: tuple[int, ...]) -> list[int]:
    """Return the longest reply to a prompt, from an engine without a cache."""
    drive = Drive(steady_loaded(architecture), EngineLimits(prefill_chunk_tokens=256))
    client = drive.submit(list(tokens), max(REPLY_TOKENS), DRAWN)
    drive.run()
    return client.ids


class ForgedRun:
    """Engine core over a forged tier, and the requests that it was sent."""

    def __init__(self, architecture: str, seed: int) -> None:
        self._architecture = architecture
        self._random = random.Random(seed)
        self.tier = ForgedTier(written_blocks(architecture))
        self.drive = new_drive(architecture, self.tier)
        # A load is worthwhile, and one that never arrives is late after milliseconds.
        self.drive.core.speeds.alone.add_work(5_000, 1.0)
        self.sent: list[SentRequest] = []
        self.cancelled: set[str] = set()
        self._num_shrunk_starts = 0  # starts from now on before which the cached prefix shrinks,
        self._tokens_at_start = 0  # to so many tokens at most
        self._start = self.drive.core.prefix_lookup.start
        self.drive.core.prefix_lookup.start = self._start_after_shrinking

    def _start_after_shrinking(self, sequence: EngineSequence, capacity_for: Callable[[int], int]) -> bool:
        if self._num_shrunk_starts:
            self._num_shrunk_starts -= 1
            self._shrink_to(self._tokens_at_start)
        return self._start(sequence, capacity_for)

    def play(self, num_actions: int) -> None:
        """Do random things, requests most often, with some steps in between."""
        common = (self._forge, self.tier.release_late, self._shrink_before_starts, self._cancel_during_a_load)
        others = (*common * 2, self._shrink, self._lose_block, self._cancel_any)
        for _ in range(num_actions):
            action = self._submit_any if self._random.random() < SUBMIT_SHARE else self._random.choice(others)
            action()
            self._step(self._random.choice((0, 1, 1, 2, 5, 20)))

    def _submit_any(self) -> None:
        self._submit(self._random.choice(PROMPTS), self._random.choice(REPLY_TOKENS))

    def _submit(self, tokens: list[int], max_tokens: int) -> None:
        client = self.drive.submit(tokens, max_tokens, DRAWN)
        sequence = weakref.ref(self.drive.core.sequences.waiting[-1])
        self.sent.append(SentRequest(client, uncached_ids(self._architecture, tuple(tokens))[:max_tokens], sequence))

    def _cancel_any(self) -> None:
        if self.sent:
            self._cancel(self._random.randrange(len(self.sent)))

    def _cancel(self, number: int) -> None:
        client = self.sent[number].client
        if client.end is None:
            self.cancelled.add(client.request.id)
            self.drive.core.executor.end_request(client.request.id)

    def _forge(self) -> None:
        self.tier.answers, self.tier.reads = self._random.choice(ANSWERS), self._random.choice(READS)
        self.tier.is_full = self._random.random() < FULL_SHARE

    def _shrink(self) -> None:
        """Evict all or some of what is cached."""
        self._shrink_to(self._random.choice((0, 150, 300)))

    def _shrink_before_starts(self) -> None:
        self._num_shrunk_starts, self._tokens_at_start = self._random.choice(((1, 0), (2, 150), (6, 300)))

    def _shrink_to(self, num_tokens: int) -> None:
        self.drive.prefix_cache.evictor.evict_to(num_tokens * self.drive.budget.token_bytes)

    def _cancel_during_a_load(self) -> None:
        self.tier.answers, self.tier.reads = "now", "never"
        self._submit(LONG, 2)
        self._step(2)
        self._cancel(-1)

    def _lose_block(self) -> None:
        self.tier.lose_block(self._random.randrange(10))

    def _step(self, count: int) -> None:
        for _ in range(count):
            if not self.drive.core.executor.is_idle:
                self.drive.core.executor.step()

    def finish(self) -> None:
        """Serve all requests to their end."""
        self._run_until_idle()
        self._serve_without_a_lasting_prefix()
        self._cancel_while_the_tier_is_full()
        self.tier.is_full = False
        settle(self.drive)

    def _serve_without_a_lasting_prefix(self) -> None:
        """Serve a request whose prefix is evicted at each start."""
        self.tier.answers = self.tier.reads = "now"
        self._num_shrunk_starts, self._tokens_at_start = 1_000_000, 0
        self._submit(LONG, 2)
        self._run_until_idle()
        self._num_shrunk_starts = 0

    def _cancel_while_the_tier_is_full(self) -> None:
        """Cancel the only request, which waits until the tier takes KV that has to go."""
        self.drive.prefix_cache.evictor.clear(tier="hot")
        self.tier.is_full = True
        for tokens in NEW_PROMPTS:
            self._submit(tokens, 2)
            self._run_until_idle()
        self._submit([*NEW_PROMPTS[0], *prompt(350, seed=7)], 2)
        self._step(2)
        assert self.drive.core.sequences.waiting, "it does not wait for the tier"
        self._cancel(-1)

    def _run_until_idle(self) -> None:
        until_s = time.monotonic() + MAX_RUN_S
        while not self.drive.core.executor.is_idle:
            assert time.monotonic() < until_s, "a request does not end"
            self.drive.core.executor.step()

    def check(self) -> None:
        """Check that all replies are right, and that nothing is left of the requests but cached KV."""
        for sent in self.sent:
            client = sent.client
            if client.request.id not in self.cancelled:
                assert client.finished.reason == "length"
                assert client.ids == sent.expected_ids
            assert client.ids == sent.expected_ids[: len(client.ids)]
        cache = self.drive.prefix_cache
        assert all(not entry.num_leases and not entry.is_running for entry in cache.table.entries)
        assert not [name for name, count in cache.counters.items() if name.startswith("failed_") and count]
        assert all(reading.wait(0) for reading in self.tier.readings), "a load is still open"
        assert self.tier.num_lookups <= MAX_TIER_LOOKUPS * (len(self.sent) + self.drive.num_preempted())
        gc.collect()
        assert not any(sent.sequence() for sent in self.sent), "a sequence that has ended is kept"


@pytest.mark.parametrize(("architecture", "seed"), [*(("llama", seed) for seed in range(5)), ("qwen3_next", 0)])
def test_requests_end_with_their_tokens_whatever_a_tier_answers(
    architecture: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_lookup, "LOOKUP_S", 0.01)
    run = ForgedRun(architecture, seed)
    run.play(num_actions=12)
    run.finish()
    run.check()
