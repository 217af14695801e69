"""State machine of the prefix cache: random operations, compared with a list of all inserted prefixes."""

from __future__ import annotations

import gc
import random
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile

import mlx.core as mx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.codecs.registry import parse
from kvstrata.kv.precision_plan import make_plan
from kvstrata.prefix_cache.entries import Lease
from kvstrata.prefix_cache.keys import root_key
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.prefix_cache.usage import UsageShare, share_of
from tests.prefix_cache.kv import HYBRID, LAYOUT, Clock, Run, Told, check_lease, new_cache, settle, store_tokens

Tokens = tuple[int, ...]

SALTS = st.sampled_from(["", "", "", "other"])
NAMES = st.sampled_from(["raw", "planes:8", "planes:4", "planes:2"])
SESSIONS = st.sampled_from(["", "a", "a", "b"])
SEEDS = st.integers(0, 10_000)
SHARES = st.floats(0, 1)
RARELY = st.sampled_from([False, False, False, True])
# A layer state that a run and a lease may share, and both count.
SLACK_BYTES = 8 << 10
STOP_EVERY = 8


def common(a: Tokens, b: Tokens) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@lru_cache
def warm_up() -> None:
    """Create what codecs keep for good, such as rotations, before memory is measured."""
    for name in ("raw", "planes:8", "planes:4", "planes:2"):
        cache = new_cache(name, min_quantize_tokens=0)
        store_tokens(cache, range(300))
        settle(cache)
        check_lease(cache.lease(range(300), ""), range(300))


@dataclass
class Naive:
    """Naive oracle of lookups: every inserted prefix, by salt."""

    filed: dict[str, list[Tokens]] = field(default_factory=lambda: {"": [], "other": []})

    def longest(self, tokens: Tokens, salt: str) -> int:
        return max((common(tokens, known) for known in self.filed[salt]), default=0)

    def add(self, tokens: Tokens, salt: str) -> None:
        others = [known for known in self.filed[salt] if common(known, tokens) < len(known)]
        if self.longest(tokens, salt) < len(tokens):
            self.filed[salt] = [*others, tokens]

    def follow(self, cache: PrefixCache) -> None:
        """Shorten every prefix to the tokens that are left in the cache after an eviction."""
        for salt, known in self.filed.items():
            left = {tokens[: cache.lookup(tokens, salt).matched_tokens] for tokens in known}
            self.filed[salt] = [tokens for tokens in left if tokens]


class PrefixCacheMachine(RuleBasedStateMachine):
    cache: PrefixCache
    naive: Naive
    runs: list[Run]
    leases: list[tuple[Lease, Tokens, str]]
    pins: list[tuple[Tokens, str]]

    @initialize(
        name=NAMES,
        live=st.booleans(),
        min_tokens=st.sampled_from([0, 100, 256]),
        is_hybrid=st.booleans(),
        seeds=st.lists(SEEDS, max_size=16),
    )
    def begin(self, name: str, live: bool, min_tokens: int, is_hybrid: bool, seeds: list[int]) -> None:
        warm_up()
        # MLX hands out freed buffers that are larger than what is asked for.
        self.cache_limit = mx.set_cache_limit(0)
        gc.collect()
        self.before_bytes = mx.get_active_memory()
        self.clock = Clock()
        self.layout = HYBRID if is_hybrid else LAYOUT
        self.listener = Told()
        self.cache = new_cache(
            name, layout=self.layout, live=live, min_quantize_tokens=min_tokens, clock=self.clock, watcher=self.listener
        )
        # Any prompt that diverges from the session's last one supersedes tokens.
        self.cache.conversations.reply_start_tokens = 10_000
        self.naive, self.runs, self.leases, self.pins = Naive(), [], [], []
        self.at_least, self.num_asked = 8, 0
        for seed in seeds:
            self.serve_one("", seed)

    def known(self, salt: str, seed: int) -> Tokens:
        """Return a prompt: an inserted prefix or its beginning, and other tokens after it."""
        # Small seeds recur, and no two prompts should be made in the same way.
        self.num_asked += 1
        rng = random.Random(10_007 * seed + self.num_asked)
        filed = self.naive.filed[salt]
        # Weighted by length, so that some prompts diverge in the middle of others.
        base = rng.choices(filed, [len(known) for known in filed])[0] if filed and rng.random() < 0.9 else ()
        kept = base[: rng.choice([len(base), rng.randint(0, len(base))])]
        length = rng.choice([1, 20, 60, 300])
        return (*kept, *(rng.randrange(3) for _ in range(rng.randint(1, length))))

    # Requests.

    @precondition(lambda self: len(self.runs) < 4)
    @rule(salt=SALTS, seed=SEEDS, room=st.sampled_from([0, 0, 100]), session=SESSIONS)
    def start(self, salt: str, seed: int, room: int, session: str) -> None:
        tokens = self.known(salt, seed)
        run = Run(self.cache, tokens, salt, room=room, session=session)
        self.is_longest(run.num_computed, tokens[:-1], salt)
        run.check(self.at_least)
        self.runs.append(run)

    def is_longest(self, num_tokens: int, tokens: Tokens, salt: str) -> None:
        """Check that a lookup has the longest prefix, or a shorter one if the model resumes at checkpoints only."""
        longest = self.naive.longest(tokens, salt)
        assert num_tokens <= longest if self.cache.needs_checkpoints else num_tokens == longest

    @precondition(lambda self: self.runs)
    @rule(seed=SEEDS, share=SHARES, is_sealed=st.booleans(), is_marked=st.booleans())
    def prefill(self, seed: int, share: float, is_sealed: bool, is_marked: bool) -> None:
        run = self.runs[seed % len(self.runs)]
        num_tokens = int(share * run.left)
        # Mostly at common positions, as chunks of prompts end.
        if seed % 4:
            num_tokens = max(0, num_tokens - (run.num_computed + num_tokens) % STOP_EVERY)
        run.compute(num_tokens)
        if is_sealed:
            run.seal(is_marked=is_marked)
            self.file(run)

    @precondition(lambda self: self.runs)
    @rule(seed=SEEDS, is_done=st.booleans())
    def end(self, seed: int, is_done: bool) -> None:
        """End a run, after its last token or in the middle."""
        run = self.runs.pop(seed % len(self.runs))
        if is_done:
            run.compute(run.left)
        run.check(self.at_least)
        run.end()
        self.file(run)

    def file(self, run: Run) -> None:
        self.naive.add(run.tokens[: run.num_sealed], run.salt)

    @rule(salt=SALTS, seed=SEEDS)
    def serve(self, salt: str, seed: int) -> None:
        self.serve_one(salt, seed)

    def serve_one(self, salt: str, seed: int) -> None:
        """Run a whole request."""
        run = Run(self.cache, self.known(salt, seed), salt, session=("", "a", "a", "b")[seed % 4])
        self.is_longest(run.num_computed, run.tokens[:-1], salt)
        while run.left:
            run.compute(STOP_EVERY - run.num_computed % STOP_EVERY)
            run.seal()
        run.end()
        self.file(run)

    @precondition(lambda self: len(self.leases) < 3)
    @rule(salt=SALTS, seed=SEEDS)
    def match(self, salt: str, seed: int) -> None:
        tokens = self.known(salt, seed)
        lease = self.cache.lease(tokens, salt)
        self.is_longest(lease.num_tokens, tokens, salt)
        check_lease(lease, tokens, self.at_least)
        self.leases.append((lease, tokens, salt))

    @precondition(lambda self: self.leases)
    @rule(seed=SEEDS)
    def release(self, seed: int) -> None:
        lease, tokens, _ = self.leases.pop(seed % len(self.leases))
        check_lease(lease, tokens, self.at_least)
        self.cache.release(lease)
        self.cache.release(lease)

    # Operations on the cache.

    @precondition(lambda self: len(self.pins) < 2)
    @rule(salt=SALTS, seed=SEEDS)
    def pin(self, salt: str, seed: int) -> None:
        tokens = self.known(salt, seed)
        num_tokens = self.cache.pins.pin(tokens, salt)
        self.is_longest(num_tokens, tokens, salt)
        self.pins.append((tokens[:num_tokens], salt))

    @precondition(lambda self: self.pins)
    @rule(seed=SEEDS)
    def unpin(self, seed: int) -> None:
        tokens, salt = self.pins.pop(seed % len(self.pins))
        self.cache.pins.unpin(tokens, salt)
        # The tokens of another pin may have been unpinned too.
        for other, others_salt in self.pins:
            self.cache.pins.pin(other, others_salt)

    @rule(share=SHARES, passed_s=st.sampled_from([0.0, 1.0, 3600.0]))
    def evict(self, share: float, passed_s: float) -> None:
        self.clock.now_s += passed_s
        limit = int(self.cache.table.nbytes * share)
        self.cache.reclaimer.shrink_to(limit)
        assert self.cache.table.nbytes <= limit or self.cache.table.evictable_bytes == 0
        self.assert_used_prefixes_stay()

    @rule(salt=st.sampled_from([None, "", "other"]))
    def clear(self, salt: str | None) -> None:
        before = self.cache.table.nbytes
        cleared = self.cache.evictor.clear(salt)
        assert self.cache.table.nbytes == before - cleared.nbytes
        if salt is None:
            assert self.cache.table.evictable_bytes == 0
        self.assert_used_prefixes_stay()

    def assert_used_prefixes_stay(self) -> None:
        for lease, tokens, salt in self.leases:
            assert self.cache.lookup(tokens, salt).matched_tokens >= lease.num_tokens
        for tokens, salt in self.pins:
            assert self.cache.lookup(tokens, salt).num_tokens == len(tokens)
        for run in self.runs:
            assert self.cache.lookup(run.tokens, run.salt).matched_tokens >= max(run.cache.start, run.num_sealed)
        self.naive.follow(self.cache)

    @rule(k=NAMES, v=NAMES, scope=st.sampled_from(["all", "live", "stored"]), force=RARELY, dry=st.booleans())
    def requantize(self, k: str, v: str, scope: str, force: bool, dry: bool) -> None:
        change = PrecisionChange(parse(k), parse(v), scope=scope, force=force, dry_run=dry)  # pyright: ignore[reportArgumentType]
        result = self.cache.requantizer.requantize(change, make_plan(self.layout, parse(k), parse(v)))
        assert result.dry_run == dry
        if force and not dry:
            self.at_least = 2

    @rule()
    def cancel_requantize(self) -> None:
        self.cache.requantizer.cancel()
        assert not self.cache.requantizer.progress().is_running

    @rule(times=st.integers(1, 4))
    def work(self, times: int) -> None:
        for _ in range(times):
            self.cache.run_background(0)

    @rule()
    def finish_work(self) -> None:
        settle(self.cache)
        # Entries in use are reviewed when they are released.
        for entry in self.cache.table.entries:
            assert entry.is_running or entry.num_leases or self.cache.transcoder.precision.pending_plan(entry) is None

    # Invariants.

    @invariant()
    def listener_knows_the_cached_prefixes(self) -> None:
        self.listener.check(self.cache)

    @invariant()
    def readers_see_the_written_values(self) -> None:
        for lease, tokens, _ in self.leases:
            check_lease(lease, tokens, self.at_least)
        for run in self.runs:
            run.check(self.at_least)
        self.memory_matches_byte_totals()

    @invariant()
    def byte_totals_match_entries(self) -> None:
        entries = self.cache.table.entries
        assert self.cache.table.nbytes == sum(entry.nbytes for entry in entries)
        assert self.cache.table.evictable_bytes == sum(entry.nbytes for entry in entries if entry.is_evictable)
        for entry in entries:
            assert entry.nbytes == entry.span.nbytes - entry.span.live_bytes * entry.is_running
        used = [entry for lease, _, _ in self.leases for entry in lease.entries]
        used += [entry for run in self.runs for entry in run.filing.lease.entries]
        assert all(entry.num_leases == used.count(entry) for entry in entries)

    @invariant()
    def running_sums_are_those_of_all_entries(self) -> None:
        cache, total = self.cache, UsageShare()
        for entry in cache.table.entries:
            total.add(share_of(entry))
        assert cache.usage.usage() == total.as_usage()
        other = cache.usage.usage("other")
        assert other.nbytes == sum(entry.nbytes for entry in cache.table.entries if entry.salt == "other")
        waiting = cache.transcoder.jobs.waiting
        assert cache.transcoder.pending_bytes() == sum(map(cache.transcoder.precision.pending_bytes, waiting))
        cache.step_down_policy.update_ladder()
        known = {entry: held for entry, held in cache.step_down_policy._ladder._spans.items() if not entry.is_running}
        ended = [entry for entry in cache.table.entries if not entry.is_running and entry.span.layers]
        assert known == {entry: cache.step_down_policy._precision_of(entry) for entry in ended}

    @invariant()
    def candidates_are_the_evictable_leaves(self) -> None:
        table = self.cache.table
        known = self.cache.candidates._order._leaves
        assert set(known) == {node for node in table.tree if node.is_leaf and node.payload.is_evictable}
        assert set(self.cache.candidates.superseded()) <= set(table.tree)
        for node, (leaf, _, _) in known.items():
            assert leaf.is_superseded == self.cache.candidates.is_superseded(node)
            span = node.payload.span
            assert (leaf.num_tokens, leaf.nbytes) == (node.num_tokens, span.nbytes * node.num_tokens // span.num_tokens)

    @invariant()
    def every_node_belongs_to_its_entry(self) -> None:
        tree = self.cache.table.tree
        nodes = list(tree)
        assert sum(len(entry.nodes) for entry in self.cache.table.entries) == len(nodes)
        for node in nodes:
            entry = node.payload
            assert entry in self.cache.table.entries
            assert node in entry.nodes
            assert entry.span.position <= node.start < node.end <= entry.span.end
        assert set(tree.root_keys) <= {root_key(self.cache.matcher.identity, salt) for salt in ("", "other")}

    def memory_matches_byte_totals(self) -> None:
        """Compare memory with the byte totals, after every reader has read: until then it holds arrays of its last
        step."""
        counted = self.cache.table.nbytes + sum(run.cache.nbytes for run in self.runs)
        held = mx.get_active_memory() - self.before_bytes
        assert counted - SLACK_BYTES <= held
        assert self.cache.has_work or held <= counted * 1.02 + SLACK_BYTES

    def teardown(self) -> None:
        if hasattr(self, "cache_limit"):
            mx.set_cache_limit(self.cache_limit)
        if not hasattr(self, "cache") or sys.exc_info()[0] is not None:
            return
        while self.runs:
            self.runs.pop().end()
        while self.leases:
            self.cache.release(self.leases.pop()[0])
        for tokens, salt in self.pins:
            self.cache.pins.unpin(tokens, salt)
        settle(self.cache)
        self.cache.evictor.clear()
        assert (self.cache.table.nbytes, self.cache.table.evictable_bytes, self.cache.table.entries) == (0, 0, {})
        mx.clear_cache()
        assert mx.get_active_memory() == self.before_bytes


TestPrefixCache = PrefixCacheMachine.TestCase
# Derandomized: the examples change with the code alone.
TestPrefixCache.settings = settings(max_examples=30, stateful_step_count=50, deadline=None, derandomize=True)
