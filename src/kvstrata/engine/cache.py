"""What may be asked of an engine's cache and changed in it: the server, the page and the command line go through here.

Every question is answered by the engine's thread between two steps. The caller gets a future. The types of the answers
are those of the store, and can be had from here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from kvstrata.codecs.registry import parse
from kvstrata.engine.loop import Loop
from kvstrata.engine.report import CacheUsage, SequenceUsage
from kvstrata.errors import InvalidRequest
from kvstrata.index.ids import TokenIds, as_ids
from kvstrata.store.precision.requantize import Change, Changed, Progress, Scope, TierChange
from kvstrata.store.report import Explanation, PartUsage, TierUsage
from kvstrata.store.store import Cleared, Store
from kvstrata.tier.chains import OnDisk
from kvstrata.tier.lookups import Lookup

__all__ = [
    "Cache",
    "CacheUsage",
    "Change",
    "Changed",
    "Cleared",
    "Explanation",
    "OnDisk",
    "PartUsage",
    "Progress",
    "Scope",
    "SequenceUsage",
    "Tier",
    "TierChange",
    "TierUsage",
    "TokenIds",
    "as_ids",
    "known_precision",
]

T = TypeVar("T")
Tier = Literal["hot", "disk", "all"]


class Ask(Protocol):
    def __call__(self, question: Callable[[Loop], T], /) -> Future[T]: ...


@dataclass(frozen=True)
class Left:
    cleared: Cleared
    left_bytes: int  # in the tiers that were cleared


def known_precision(name: str) -> str:
    """As it is shown. Raises ConfigError, with the names that there are."""
    return parse(name).name


class Cache:
    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def usage(self, owner: str | None = None) -> Future[CacheUsage]:
        """Of what is under an owner's salts; None: all."""
        return self._ask(lambda loop: loop.usage(owner))

    def requantize(self, change: Change) -> Future[tuple[Changed, CacheUsage]]:
        """Raises ConfigError for a precision that the model's layers cannot be stored in."""

        def question(loop: Loop) -> tuple[Changed, CacheUsage]:
            _store(loop)
            if change.scope == "disk":
                _require_tier(loop, "disk", param="scope")
            return loop.requantize(change), loop.usage(change.owner)

        return self._ask(question)

    def requantize_progress(self, owner: str | None = None) -> Future[Progress]:
        return self._ask(lambda loop: loop.requantize_progress(owner))

    def cancel_requantize(self, owner: str | None = None) -> Future[Progress]:
        return self._ask(lambda loop: loop.cancel_requantize(owner))

    def ask_disk(self, ids: TokenIds, salt: str) -> Future[Lookup[OnDisk] | None]:
        """What the disk has of a prompt, which it tells on a thread of its own; None: there is no disk."""
        return self._ask(lambda loop: None if loop.store is None else loop.store.ask_disk(ids, salt))

    def explain(self, ids: TokenIds, salt: str, on_disk: OnDisk | None) -> Future[Explanation]:
        """`on_disk`: what the disk told; None: it did not."""

        def question(loop: Loop) -> Explanation:
            if loop.store is None:
                return Explanation(len(ids), 0, {}, "foreign", 0)
            return loop.store.explain(ids, salt, on_disk)

        return self._ask(question)

    def clear(self, salt: str | None, tier: Tier, *, owner: str | None) -> Future[Left]:
        def question(loop: Loop) -> Left:
            _require_tier(loop, tier, param="tier")
            cleared = _store(loop).clear(salt, tier, owner=owner)
            tiers = loop.usage(owner).tiers.items()
            return Left(cleared, sum(left.nbytes for name, left in tiers if tier in ("all", name)))

        return self._ask(question)

    def pin(self, ids: TokenIds, salt: str, quota: Callable[[int], int] | None) -> Future[int]:
        """Tells how many tokens are kept. `quota`: how many bytes may be pinned, of those that there are for stored
        KV; None: any number."""

        def question(loop: Loop) -> int:
            store = _store(loop)
            return store.pin(ids, salt, None if quota is None else quota(store.options.hot_bytes))

        return self._ask(question)

    def unpin(self, ids: TokenIds, salt: str) -> Future[int]:
        return self._ask(lambda loop: _store(loop).unpin(ids, salt))


def _store(loop: Loop) -> Store:
    if loop.store is None:
        raise InvalidRequest(
            "This model brings caches of its own kind, which cannot be shared: nothing is stored. GET /props shows its "
            "layers.",
            code="no_store",
        )
    return loop.store


def _require_tier(loop: Loop, tier: Tier, *, param: str) -> None:
    tiers = loop.usage().tiers
    if tier != "all" and tier not in tiers:
        raise InvalidRequest(f"{param}: this server has no {tier} tier, only {', '.join(tiers)}.", param=param)
