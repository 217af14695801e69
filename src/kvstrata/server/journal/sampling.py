"""Looks at the server at the end of each slot, on the event loop, and notes what changed.

Costs the engine's thread what a scrape of /metrics costs, once a slot while something happens. When nothing has changed
for some slots the engine is left asleep, and the last sample stands for those that follow.
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

# Looks without news after which the engine is not asked: the disk may still be writing when requests have ended.
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
        """Until it is cancelled."""
        await self.look(self._journal.slots.current)
        while True:
            slot = self._journal.slots.current
            await asyncio.sleep(self._journal.slots.left_s())
            await self.look(slot)

    async def look(self, slot: Slot) -> None:
        """At the end of this slot."""
        service = self._service
        generated = service.metrics.generated_tokens()
        slot.tokens_per_s = (generated - self._generated) / self._journal.slots.slot_s
        self._generated = generated
        state = service.engine.state()
        if self._is_news(state, has_written=slot.tokens_per_s > 0):
            # Where the engine has stopped, the last sample stands.
            with contextlib.suppress(Unavailable):
                self._note(await ask_cache(service, lambda cache: cache.usage()))
        if self._usage is not None:
            slot.sample = _sample(self._usage, state)

    def _is_news(self, state: EngineState, *, has_written: bool) -> bool:
        # The most that was ever in use, and speeds, are no signs of life.
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
