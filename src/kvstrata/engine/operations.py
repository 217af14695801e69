"""What callers ask of the cache and change in it, on the engine's thread between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from kvstrata.engine.loop import Loop
from kvstrata.engine.memory import with_rungs
from kvstrata.engine.report import CacheUsage, cache_usage
from kvstrata.errors import InvalidRequest
from kvstrata.index.identity import owner_of
from kvstrata.index.ids import TokenIds
from kvstrata.store.census import Census, Conversation, Counted
from kvstrata.store.clearing import Cleared
from kvstrata.store.cold.cold import Lying
from kvstrata.store.dropping import Dropped
from kvstrata.store.entry import Entry
from kvstrata.store.errands import Steps, run_to_end
from kvstrata.store.explain import Explanation
from kvstrata.store.precision.requantize import Change, Changed, Progress
from kvstrata.store.strata import Strata
from kvstrata.tier.chains import OnDisk
from kvstrata.tier.lookups import Lookup, answered

Tier = Literal["hot", "disk", "all"]


@dataclass(frozen=True)
class Left:
    cleared: Cleared
    left_bytes: int  # in the tiers that were cleared


class Operations:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._stock = loop.stock

    def usage(self, owner: str | None = None) -> CacheUsage:
        """Of what is under an owner's salts; None: all."""
        return cache_usage(self._stock, self._loop.budget, self._loop.sequences.running.values(), owner)

    def requantize(self, change: Change) -> Changed:
        """Raises ConfigError for a precision that the model's layers cannot be stored in."""
        return run_to_end(self.requantizing(change))

    def requantizing(self, change: Change) -> Steps[Changed]:
        """Likewise in small steps, each of which costs the same with ten entries and with thousands."""
        self._require_store()
        if change.scope == "disk":
            self._require_tier("disk", param="scope")
        loop, changes = self._loop, self._stock.changes
        plan = loop.plans.plan_of(change.k or changes.target.k, change.v or changes.target.v)
        changed = yield from changes.requantizing(change, plan, self._entries_of(change.sequence, change.owner))
        loop.capacity.budget = with_rungs(loop.budget, loop.plans, changes.target)
        return changed

    def requantize_progress(self, owner: str | None = None) -> Progress:
        self._require_store()
        return self._stock.changes.progress(owner)

    def cancel_requantize(self, owner: str | None = None) -> Progress:
        self._require_store()
        return self._stock.changes.cancel(owner)

    def ask_disk(self, ids: TokenIds, salt: str) -> Lookup[OnDisk | None]:
        """What the disk has of a prompt, which it tells on a thread of its own."""
        return self._stock.ask_disk(ids, salt)

    def ask_shared(self, ids: TokenIds, salt: str) -> Lookup[OnDisk | None]:
        """The same of the tier that other servers share."""
        return self._stock.ask_shared(ids, salt)

    def explain(self, ids: TokenIds, salt: str, on_disk: OnDisk | None, in_shared: OnDisk | None) -> Explanation:
        """`on_disk`, `in_shared`: what those tiers told; None: they did not."""
        return self._stock.explain(ids, salt, on_disk, in_shared)

    def count(self, census: Census, seconds: float) -> Counted:
        """Go on with a census for about so long."""
        return census.go_on(self._stock.search, self._stock.cold, seconds)

    def tell(self, strata: Strata, seconds: float) -> Strata:
        """Go on with telling what memory holds, for about so long."""
        strata.go_on(self._stock.shelf, self._stock.leaves, self._stock.search, seconds)
        return strata

    def lie_on_disk(self, asked: Iterable[Conversation]) -> Lookup[tuple[tuple[Lying, ...], ...]]:
        """In which runs conversations lie on the disk, which it tells on a thread of its own. The answer is empty where
        there is no disk."""
        return self._stock.cold.lie(self._rooted(asked))

    def lie_in_shared(self, asked: Iterable[Conversation]) -> tuple[Lookup[tuple[int, ...]], str]:
        """How many tokens of conversations the tier has that servers share, and in which precision; likewise."""
        shared = self._stock.shared
        if shared is None:
            return answered(()), ""
        return shared.cold.reach(self._rooted(asked)), shared.tier.shared_usage().precision

    def drop(self, ids: TokenIds, salt: str, *, is_dry: bool) -> Dropped:
        """What no other conversation has of this one."""
        self._require_store()
        return self._stock.dropping.drop(ids, salt, is_dry=is_dry)

    def _rooted(self, asked: Iterable[Conversation]) -> list[tuple[bytes, TokenIds]]:
        return [(self._stock.search.root_of(each.salt), each.ids) for each in asked]

    def clear(self, salt: str | None, tier: Tier, *, owner: str | None) -> Left:
        self._require_tier(tier, param="tier")
        self._require_store()
        cleared = self._stock.clearing.clear(salt, tier, owner=owner)
        tiers = self.usage(owner).tiers.items()
        return Left(cleared, sum(left.nbytes for name, left in tiers if tier in ("all", name)))

    def pin(self, ids: TokenIds, salt: str, quota: Callable[[int], int] | None) -> int:
        """Tells how many tokens are kept. `quota`: how many bytes may be pinned, of those that there are for stored
        KV; None: any number."""
        self._require_store()
        return self._stock.pins.pin(ids, salt, None if quota is None else quota(self._stock.shelf.max_bytes))

    def unpin(self, ids: TokenIds, salt: str) -> int:
        self._require_store()
        return self._stock.pins.unpin(ids, salt)

    def _entries_of(self, request_id: str | None, owner: str | None) -> set[Entry] | None:
        """What a running request holds; None: no request was named. Another owner's is as good as none."""
        if request_id is None:
            return None
        for sequence in self._loop.sequences.running.values():
            is_own = owner is None or owner_of(sequence.request.salt) == owner
            if sequence.request.id == request_id and is_own and sequence.stored.filing is not None:
                return sequence.stored.filing.entries
        raise InvalidRequest(f"No request {request_id[:80]!r} is running. GET /cache/usage lists those that are.")

    def _require_store(self) -> None:
        if not self._stock.store.can_share:
            raise InvalidRequest(
                "This model brings caches of its own kind, which cannot be shared: nothing is stored. GET /props shows "
                "its layers.",
                code="no_store",
            )

    def _require_tier(self, tier: Tier, *, param: str) -> None:
        tiers = self.usage().tiers
        if tier != "all" and tier not in tiers:
            raise InvalidRequest(f"{param}: this server has no {tier} tier, only {', '.join(tiers)}.", param=param)
