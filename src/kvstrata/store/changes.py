"""A change of precision that somebody asked for: what it concerns, how far it is, and the end of it.

Decides what every entry should be stored as; the mover does it bit by bit, the restorer brings back from the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvstrata.spans.plan import Plan
from kvstrata.store.entry import Entry
from kvstrata.store.mover import Mover
from kvstrata.store.precision import Precision
from kvstrata.store.report import TierUsage
from kvstrata.store.requantize import Assessor, Change, Changed, Progress, Requantizing, in_scope
from kvstrata.store.restore import Restorer
from kvstrata.store.shelf import Shelf

# Of the bytes that a plan asks for: a span that has fewer is in a lower precision.
RESTORE_SHARE = 0.9


class Changes:
    """`review` is told of every entry that should be stored in another way, or no longer should."""

    def __init__(
        self,
        shelf: Shelf,
        precision: Precision,
        mover: Mover,
        restorer: Restorer,
        *,
        puts_away: bool,
        review: Callable[[Entry], None],
    ) -> None:
        self._shelf = shelf
        self._precision = precision
        self._mover = mover
        self._restorer = restorer
        self._puts_away = puts_away
        self._review = review
        self._current: Requantizing | None = None

    def assess(
        self, change: Change, plan: Plan, sequence_entries: Collection[Entry] | None, disk: TierUsage | None
    ) -> Changed:
        """What it would free, and what it would leave alone."""
        window = self._precision.options.window
        assessor = Assessor(window, self._restorer.restored_bytes, disk=disk, puts_away=self._puts_away)
        return assessor.assess(self._concerned(change, sequence_entries), plan, change)

    def begin(
        self, change: Change, plan: Plan, sequence_entries: Collection[Entry] | None, *, asked_at_s: float
    ) -> None:
        """In place of whatever was going on."""
        entries = self._concerned(change, sequence_entries)
        self.cancel()
        self._current = Requantizing(entries, plan, self._precision.target, self._is_pending, asked_at_s)
        if change.is_general:
            self._precision.target = plan
        for entry in entries:
            entry.target, entry.goes_up = plan, change.force
            entry.asked_at = entry.span.written_end if entry.is_running else None
            # What was begun for another target goes no further.
            self._mover.discard(entry)
            if not change.force and _is_lower(entry, plan):
                self._restorer.add(entry)
            self._review(entry)
        self._current.look()

    def _concerned(self, change: Change, sequence_entries: Collection[Entry] | None) -> list[Entry]:
        return [entry for entry in self._shelf.entries if in_scope(entry, change, sequence_entries)]

    def _is_pending(self, entry: Entry) -> bool:
        return self._mover.has(entry) or self._restorer.has(entry)

    def progress(self) -> Progress:
        return self._current.progress() if self._current else Progress()

    def look(self) -> None:
        """Whether it has ended is noticed when somebody looks."""
        if self._current is not None:
            self._current.look()

    @property
    def is_running(self) -> bool:
        self.look()
        return self._current is not None and self._current.is_running

    def cancel(self) -> Progress:
        """What is not done yet stays as it is; every span is whole. New spans are stored as before the change."""
        progress = self.progress()
        if self._current and progress.is_running:
            self._precision.target = self._current.before
            # What runs may have nothing to be encoded now, and would later.
            undone = [entry for entry in self._current.entries if entry.is_running or self._is_pending(entry)]
            for entry in undone:
                self._give_up(entry, self._current.plan)
        self._restorer.cancel()
        self._current = None
        return progress

    def _give_up(self, entry: Entry, plan: Plan) -> None:
        if entry.target is plan:
            self._mover.discard(entry)
            entry.target, entry.goes_up, entry.asked_at = None, False, None
            # One that waits to be trimmed still is.
            self._review(entry)


def _is_lower(entry: Entry, plan: Plan) -> bool:
    """Whether it is stored in fewer bits than the plan has."""
    target = plan.token_bytes(entry.span.layout) * entry.span.num_tokens
    return not entry.is_running and entry.span.kv_bytes < RESTORE_SHARE * target
