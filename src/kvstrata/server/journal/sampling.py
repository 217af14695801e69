"""The sampler of the journal: at the end of each slot it reads the server's counters and records changes. Runs on the
event loop.

Costs the engine's thread as much as a scrape of /metrics, once per slot while something changes. After some slots
without changes it leaves the engine asleep and repeats the last sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

from kvstrata.engine.cache_api import CacheUsage
from kvstrata.engine.request import EngineState
from kvstrata.errors import Unavailable
from kvstrata.server.cache import ask_cache
from kvstrata.server.journal.events import most_grown, retargeted, risen
from kvstrata.server.journal.slots import Sample, Slot

if TYPE_CHECKING:
    from kvstrata.server.service import Service

# Unchanged samples before the engine is left asleep: the disk may still be writing after requests have ended.
SETTLED_AFTER = 6


class JournalSampler:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._journal = service.journal
        self._generated = service.metrics.generated_tokens()
        self._state: EngineState | None = None
        self._usage: CacheUsage | None = None
        self._counters: dict[str, int] = {}
        self._num_quiet = 0

    async def run(self) -> None:
        """Sample at the end of each slot until cancelled."""
        await self.look(self._journal.slots.current)
        while True:
            slot = self._journal.slots.current
            await asyncio.sleep(self._journal.slots.left_s())
            await self.look(slot)

    async def look(self, slot: Slot) -> None:
        """Record a sample in a slot that is ending."""
        service = self._service
        generated = service.metrics.generated_tokens()
        slot.tokens_per_s = (generated - self._generated) / self._journal.slots.slot_s
        self._generated = generated
        state = service.engine.state()
        if self._is_news(state, has_written=slot.tokens_per_s > 0):
            # If the engine has stopped, the last sample is repeated.
            with contextlib.suppress(Unavailable):
                self._note(await ask_cache(service, lambda cache: cache.usage()))
        if self._usage is not None:
            slot.sample = _sample(self._usage, state)

    def _is_news(self, state: EngineState, *, has_written: bool) -> bool:
        # Peak and active memory and speeds do not count as changes.
        plain = dataclasses.replace(state, peak_bytes=0, active_bytes=0, decode_tokens_s=0.0, prefill_tokens_s=0.0)
        self._num_quiet = 0 if plain != self._state or state.running or has_written else self._num_quiet + 1
        self._state = plain
        return self._num_quiet < SETTLED_AFTER

    def _note(self, usage: CacheUsage) -> None:
        now_s = self._journal.slots.now_s()
        counters = {**usage.counters, "set_aside": self._service.metrics.set_aside_total()}
        if self._usage is not None:
            before, after = (each.tiers["hot"].by_precision for each in (self._usage, usage))
            grown = most_grown(before, after)
            self._journal.events.extend(risen(self._counters, counters, now_s, grown=grown))
            if usage.target != self._usage.target:
                self._journal.events.append(retargeted(*usage.target, now_s))
        self._usage, self._counters = usage, counters


def _sample(usage: CacheUsage, state: EngineState) -> Sample:
    tiers = {
        name: {"bytes": tier.nbytes, "tokens": tier.tokens, "by_precision": dict(tier.by_precision)}
        for name, tier in usage.tiers.items()
    }
    return Sample(state.running, state.waiting, usage.budget_bytes, usage.running_bytes, tiers)
