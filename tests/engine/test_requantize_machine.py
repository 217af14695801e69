"""Random changes of precision while requests arrive, run and end, on a real model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.codecs.registry import parse
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.models.load import LoadedModel
from kvstrata.prefix_cache.requantize import PrecisionChange
from tests.engine.drive import Client, Drive, do_one_step
from tests.engine.test_loop import prompt
from tests.support.models import tiny_loaded

NAME = st.sampled_from(["planes:8", "planes:4", "planes:2", "raw"])
SCOPE = st.sampled_from(["all", "all", "live", "stored"])
FORCE = st.sampled_from([False, False, True])
SEEDS = st.integers(0, 5)
OF = st.none() | SEEDS  # index of a running request


@cache
def loaded() -> LoadedModel:
    return tiny_loaded("llama")


@dataclass
class Played:
    """An engine loop with the calls made on it. Jobs advance by steps, not by time, so that the same calls repeat the
    same run."""

    live: bool
    drive: Drive = field(init=False)
    clients: list[Client] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = EngineLimits(max_running=3, buffer_step_tokens=64, prefill_chunk_tokens=128)
        storage = KvConfig(encodes_running=self.live, first_raw_tokens=2, recent_raw_tokens=8, min_quantize_tokens=16)
        self.drive = Drive(loaded(), limits, storage=storage)
        do_one_step(self.drive.core.pacer)

    def submit(self, seed: int, length: int, max_tokens: int, salt: str) -> None:
        self.clients.append(self.drive.submit(prompt(length, seed=seed), max_tokens, salt=salt))

    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.drive.core.executor.is_idle:
                self.drive.core.executor.step()
            elif self.drive.core.pacer.has_work:
                self.drive.core.pacer.run_slice(0)

    def requantize(self, k: str, v: str, scope: Any, force: bool, of: int | None, salt: str | None) -> None:
        running = [sequence.id for sequence in self.drive.cache.usage().sequences]
        sequence = running[of % len(running)] if of is not None and running else None
        change = PrecisionChange(parse(k), parse(v), scope=scope, force=force, sequence=sequence, salt=salt)
        estimated = self.drive.cache.requantize(
            PrecisionChange(parse(k), parse(v), scope=scope, force=force, dry_run=True, salt=salt)
        )
        assert estimated.tiers["hot"].bytes_freed >= 0 or force
        self.drive.cache.requantize(change)

    def cancel(self) -> None:
        self.drive.cache.cancel_requantize()
        assert not self.drive.cache.requantize_progress().is_running

    def end_request(self, which: int) -> None:
        self.drive.core.executor.end_request(self.clients[which % len(self.clients)].request.id)

    def finish(self) -> None:
        self.drive.run()

    def output(self) -> list[tuple[list[int], list[float]]]:
        return [(client.ids, [logprob.logprob for logprob in client.logprobs]) for client in self.clients]


class RequantizeMachine(RuleBasedStateMachine):
    played: Played

    @initialize(live=st.booleans(), changes=st.lists(st.tuples(NAME, NAME, SCOPE, FORCE, OF), min_size=3))
    def begin(self, live: bool, changes: list[Any]) -> None:
        self.live = live
        self.played = Played(live)
        self.was_played: list[tuple[str, tuple[Any, ...]]] = []
        # Every example has a cached prefix, running requests and changes of both.
        self.play("submit", 0, 420, 2, "")
        self.play("finish")
        self.play("submit", 1, 300, 40, "")
        self.play("submit", 0, 420, 40, "b")
        self.play("step", 8)
        for change in changes[:4]:
            self.play("requantize", *change, None)
            self.play("step", 5)

    def play(self, name: str, *arguments: Any) -> None:
        self.was_played.append((name, arguments))
        getattr(self.played, name)(*arguments)

    @precondition(lambda self: sum(client.end is None for client in self.played.clients) < 4)
    @rule(seed=SEEDS, length=st.sampled_from([40, 300, 420]), most=st.integers(1, 24), salt=st.sampled_from(["", "b"]))
    def submit(self, seed: int, length: int, most: int, salt: str) -> None:
        self.play("submit", seed, length, most, salt)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        self.play("step", count)

    @rule(k=NAME, v=NAME, scope=SCOPE, force=FORCE, of=OF, count=st.integers(0, 8))
    def requantize(self, k: str, v: str, scope: str, force: bool, of: int | None, count: int) -> None:
        self.play("requantize", k, v, scope, force, of, None)
        self.play("step", count)

    @rule(k=NAME, salt=st.sampled_from(["", "b", "nobody's"]))
    def requantize_one_salt(self, k: str, salt: str) -> None:
        self.play("requantize", k, "planes:4", "all", False, None, salt)

    @rule()
    def cancel(self) -> None:
        self.play("cancel")

    @precondition(lambda self: self.played.clients)
    @rule(which=SEEDS)
    def end_request(self, which: int) -> None:
        self.play("end_request", which)

    @rule()
    def finish(self) -> None:
        self.play("finish")

    @invariant()
    def every_span_decodes(self) -> None:
        if not hasattr(self, "played"):
            return
        for entry in self.played.drive.prefix_cache.table.entries:
            span = entry.span
            for layer in span.layers if span.num_tokens else ():
                parts = span.segments(layer, span.position, span.end)
                assert sum(part.num_tokens for part in parts) == span.num_tokens
                for part in parts:
                    dense = part.dense(mx.float32)
                    assert all(np.isfinite(np.asarray(array)).all() for array in dense)

    @invariant()
    def byte_counts_match_entries(self) -> None:
        if hasattr(self, "played"):
            entries = self.played.drive.prefix_cache.table.entries
            assert self.played.drive.prefix_cache.table.nbytes == sum(entry.nbytes for entry in entries)

    def teardown(self) -> None:
        """Check that all requests finish, and that the same calls on a fresh engine give the same output."""
        if not hasattr(self, "played") or not self.played.clients:
            return
        self.play("finish")
        assert all(client.finished for client in self.played.clients)
        again = Played(self.live)
        for name, arguments in self.was_played:
            getattr(again, name)(*arguments)
        assert again.output() == self.played.output()


TestRequantize = RequantizeMachine.TestCase
# The same examples each time, so that a failure depends on the engine alone.
TestRequantize.settings = settings(max_examples=5, stateful_step_count=10, deadline=None, derandomize=True)
