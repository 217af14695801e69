"""What may be asked of an engine's cache and changed in it: the server, the page and the command line go through here.

Every question is answered by the engine's thread between two steps. The caller gets a future. The types of the answers
are those of the store, and can be had from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from kvstrata.codecs.base import Codec
from kvstrata.codecs.registry import parse as parse_precision
from kvstrata.engine.loop import Loop
from kvstrata.engine.operations import Left, Operations, Tier
from kvstrata.engine.report import CacheUsage, SequenceUsage
from kvstrata.index.identity import owner_of
from kvstrata.index.ids import TokenIds, as_ids
from kvstrata.store.census import Census, Conversation, Counted, Holding
from kvstrata.store.clearing import Cleared
from kvstrata.store.cold.cold import Lying
from kvstrata.store.dropping import Dropped
from kvstrata.store.errands import Steps
from kvstrata.store.explain import Explanation
from kvstrata.store.precision.requantize import Change, Changed, Progress, Scope, TierChange
from kvstrata.store.report import PartUsage, Stored, TierUsage
from kvstrata.store.strata import Strata, Stratum
from kvstrata.tier.base import SharedUsage
from kvstrata.tier.chains import OnDisk
from kvstrata.tier.lookups import Lookup

__all__ = [
    "Cache",
    "CacheUsage",
    "Census",
    "Change",
    "Changed",
    "Cleared",
    "Codec",
    "Conversation",
    "Counted",
    "Dropped",
    "Explanation",
    "Holding",
    "Lying",
    "OnDisk",
    "PartUsage",
    "Progress",
    "Scope",
    "SequenceUsage",
    "SharedUsage",
    "Stored",
    "Strata",
    "Stratum",
    "Tier",
    "TierChange",
    "TierUsage",
    "TokenIds",
    "as_ids",
    "owner_of",
    "parse_precision",
]

T = TypeVar("T")


class Ask(Protocol):
    def __call__(self, question: Callable[[Loop], T], /) -> Future[T]: ...


class Cache:
    """See `Operations`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def usage(self, owner: str | None = None) -> Future[CacheUsage]:
        return self._ask(lambda loop: Operations(loop).usage(owner))

    def requantize(self, change: Change) -> Future[tuple[Changed, CacheUsage]]:
        """With what is held then."""

        def steps(loop: Loop) -> Steps[tuple[Changed, CacheUsage]]:
            operations = Operations(loop)
            changed = yield from operations.requantizing(change)
            return changed, operations.usage(change.owner)

        return self._have_done(steps)

    def _have_done(self, steps: Callable[[Loop], Steps[T]]) -> Future[T]:
        """Have work done in small steps between those of the engine."""
        answer: Future[T] = Future()

        def pass_on(done: Future[T]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            else:
                answer.set_exception(error)

        def begun(asked: Future[Future[T]]) -> None:
            error = asked.exception()
            if error is None:
                asked.result().add_done_callback(pass_on)
            else:
                answer.set_exception(error)

        answer.set_running_or_notify_cancel()
        self._ask(lambda loop: loop.stock.errands.add(steps(loop))).add_done_callback(begun)
        return answer

    def requantize_progress(self, owner: str | None = None) -> Future[Progress]:
        return self._ask(lambda loop: Operations(loop).requantize_progress(owner))

    def cancel_requantize(self, owner: str | None = None) -> Future[Progress]:
        return self._ask(lambda loop: Operations(loop).cancel_requantize(owner))

    def ask_disk(self, ids: TokenIds, salt: str) -> Future[Lookup[OnDisk | None]]:
        return self._ask(lambda loop: Operations(loop).ask_disk(ids, salt))

    def ask_shared(self, ids: TokenIds, salt: str) -> Future[Lookup[OnDisk | None]]:
        return self._ask(lambda loop: Operations(loop).ask_shared(ids, salt))

    def explain(
        self, ids: TokenIds, salt: str, on_disk: OnDisk | None, in_shared: OnDisk | None = None
    ) -> Future[Explanation]:
        return self._ask(lambda loop: Operations(loop).explain(ids, salt, on_disk, in_shared))

    def count(self, census: Census, seconds: float) -> Future[Counted]:
        """The next slice of a census. Not before the answer to the last one has come."""
        return self._ask(lambda loop: Operations(loop).count(census, seconds))

    def tell(self, strata: Strata, seconds: float) -> Future[Strata]:
        """The next slice of what memory holds. Not before the answer to the last one has come."""
        return self._ask(lambda loop: Operations(loop).tell(strata, seconds))

    def lie_on_disk(self, asked: Iterable[Conversation]) -> Future[Lookup[tuple[tuple[Lying, ...], ...]]]:
        return self._ask(lambda loop: Operations(loop).lie_on_disk(asked))

    def lie_in_shared(self, asked: Iterable[Conversation]) -> Future[tuple[Lookup[tuple[int, ...]], str]]:
        return self._ask(lambda loop: Operations(loop).lie_in_shared(asked))

    def drop(self, ids: TokenIds, salt: str, *, is_dry: bool) -> Future[Dropped]:
        return self._ask(lambda loop: Operations(loop).drop(ids, salt, is_dry=is_dry))

    def clear(self, salt: str | None, tier: Tier, *, owner: str | None) -> Future[Left]:
        return self._ask(lambda loop: Operations(loop).clear(salt, tier, owner=owner))

    def pin(self, ids: TokenIds, salt: str, quota: Callable[[int], int] | None) -> Future[int]:
        return self._ask(lambda loop: Operations(loop).pin(ids, salt, quota))

    def unpin(self, ids: TokenIds, salt: str) -> Future[int]:
        return self._ask(lambda loop: Operations(loop).unpin(ids, salt))
