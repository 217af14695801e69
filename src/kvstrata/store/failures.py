"""Faults of the cache: contained where an operation is called, counted each time, logged once for each reason.

An operation that fails before it has changed the table costs its caller the cached prefix, and nothing else. One that
fails after that has left the table half changed: the table counts as broken, no operation uses it any more, and the
engine goes on with an empty one (`Loop.take_over`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from kvstrata.errors import KvstrataError
from kvstrata.store.shelf import Shelf

log = logging.getLogger(__name__)

T = TypeVar("T")
Chore = Literal[
    "rewrites",
    "spills",
    "promotions",
    "restores",
    "shares",
    "lookups",
    "loads",
    "commits",
    "releases",
    "reclaims",
    "slices",
]

# Of reasons that were logged, so that one whose text differs each time does not fill memory.
MAX_REASONS = 64


class Failures:
    def __init__(self, counters: Counter[str], shelf: Shelf) -> None:
        self.counters = counters
        self._shelf = shelf
        self._logged: set[str] = set()

    @property
    def is_broken(self) -> bool:
        """Whether the table is half changed, and must be replaced."""
        return self._shelf.is_broken

    def note(self, chore: Chore, error: Exception) -> None:
        self.counters[f"failed_{chore}"] += 1
        reason = f"{chore}: {error!r}"
        if reason not in self._logged and len(self._logged) < MAX_REASONS:
            self._logged.add(reason)
            log.error("Work on the cache failed (%s). Requests go on without it.", reason, exc_info=error)

    def attempt(self, chore: Chore, operation: Callable[[], T], otherwise: T) -> T:
        """Return what an operation returns, or `otherwise` where it fails."""
        if self._shelf.is_broken:
            return otherwise
        try:
            with self.watching():
                return operation()
        except Exception as error:  # noqa: BLE001
            self.note(chore, error)
            return otherwise

    @contextmanager
    def counting(self, chore: Chore) -> Iterator[None]:
        """Note an exception of the body in place of raising it: the body's work stays undone."""
        try:
            with self.watching():
                yield
        except Exception as error:  # noqa: BLE001
            self.note(chore, error)

    def require(self, chore: Chore, operation: Callable[[], T], otherwise: T) -> T:
        """Likewise for an operation that must not be left out: without it entries would stay leased, or memory full."""

        def run() -> T:
            try:
                return operation()
            except Exception:
                self._shelf.is_broken = True
                raise

        return self.attempt(chore, run, otherwise)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark the table as broken where an exception leaves the body half done."""
        num_changes = self._shelf.num_changes
        try:
            yield
        except (KvstrataError, StopIteration):
            raise  # a refusal, before anything was begun; the end of a generator
        except Exception:
            self._shelf.is_broken |= self._shelf.num_changes != num_changes
            raise
