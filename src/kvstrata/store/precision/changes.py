"""Changes of precision that were asked for: what they concern, how far they are, and the end of them.

Decides what every entry should be stored as; the mover does it bit by bit, the restorer brings back from the disk.
Several changes may be under way: each entry follows the last one that concerns it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator

from kvstrata.spans.live import written_end
from kvstrata.spans.plan import Plan
from kvstrata.store.cold.restore import Restorer
from kvstrata.store.entry import Entry
from kvstrata.store.errands import run_to_end
from kvstrata.store.leaves import Leaves
from kvstrata.store.precision.requantize import (
    Assessment,
    Assessor,
    Change,
    Changed,
    Progress,
    Requantizing,
    held_bytes,
    in_scope,
    total_of,
)
from kvstrata.store.precision.rewriting import Rewriting
from kvstrata.store.report import TierUsage
from kvstrata.store.room import Room
from kvstrata.store.shelf import Shelf

# Of the bytes that a plan asks for: a span that has fewer is in a lower precision.
RESTORE_SHARE = 0.9


class Changes:
    """What goes up takes the room that there is: nothing has to go for it. `disk_usage` tells what an owner, or all,
    have on the disk; None where there is none."""

    def __init__(
        self,
        shelf: Shelf,
        leaves: Leaves,
        rewriting: Rewriting,
        restorer: Restorer,
        room: Room,
        disk_usage: Callable[[str | None], TierUsage | None],
    ) -> None:
        self._shelf = shelf
        self._leaves = leaves
        self._rewriting = rewriting
        self._precision = rewriting.precision
        self._mover = rewriting.mover
        self._restorer = restorer
        self._room = room
        self._disk_usage = disk_usage
        self._changed = shelf.journal.reader(self._remove)
        self._asked: list[Requantizing] = []  # in order, since the last time that none was under way

    @property
    def target(self) -> Plan:
        """What new spans are stored as."""
        return self._precision.target

    def requantize(self, change: Change, plan: Plan, sequence_entries: Collection[Entry] | None = None) -> Changed:
        """Change what is cached, and what new spans are stored as. The work is done bit by bit, by the chores."""
        return run_to_end(self.requantizing(change, plan, sequence_entries))

    def requantizing(
        self, change: Change, plan: Plan, sequence_entries: Collection[Entry] | None = None
    ) -> Generator[None, None, Changed]:
        """Likewise; what it comes to is looked at in small steps, and the change begins with the last of them."""
        asked_at_s = time.perf_counter()
        assessed = yield from self._assess(change, plan, sequence_entries)
        if not change.dry_run:
            self._begin(change, plan, assessed, asked_at_s)
            self._has_new_target()
        return assessed.changed

    def _assess(
        self, change: Change, plan: Plan, sequence_entries: Collection[Entry] | None
    ) -> Generator[None, None, Assessment]:
        """What it would free, and what it would leave alone."""
        assessor = Assessor(
            self._precision.window,
            self._restorer.restored_bytes,
            disk=self._disk_usage(change.owner),
            puts_away=self._precision.options.put_away,
            room_bytes=self._room.left_bytes,
        )
        # What was used last goes up first.
        entries = sorted(self._concerned(change, sequence_entries), key=self._leaves.used_s, reverse=True)
        return (yield from assessor.assess(entries, plan, change))

    def _begin(self, change: Change, plan: Plan, assessed: Assessment, asked_at_s: float) -> None:
        """Beside those that are under way, and in their place for the entries that they share."""
        entries = [entry for entry in assessed.entries if entry in self._shelf.entries]
        if not self.is_running:
            self._asked.clear()
        before = self._target_before() if change.is_general else None
        before_bytes = {entry: held_bytes(entry) for entry in entries}
        for earlier in self._asked:
            before_bytes |= earlier.leave(entries)
        self._asked.append(Requantizing(before_bytes, plan, before, self._is_pending, asked_at_s, change.owner))
        if change.is_general:
            self._precision.target = plan
        for entry in entries:
            self._give_target(entry, plan, change, has_room=entry not in assessed.without_room)
        self.look()

    def _target_before(self) -> Plan:
        """What new spans were stored as before the changes that are under way."""
        running = [change for change in self._asked if change.is_running]
        return next((change.before for change in running if change.before is not None), self._precision.target)

    def _give_target(self, entry: Entry, plan: Plan, change: Change, *, has_room: bool) -> None:
        entry.target, entry.goes_up = plan, change.force and has_room
        entry.asked_at = written_end(entry.span) if entry.is_running else None
        # What was begun for another target goes no further.
        self._mover.discard(entry)
        self._restorer.discard(entry)
        if not change.force and has_room and _is_lower(entry, plan):
            self._restorer.add(entry)
        self._shelf.journal.note(entry)
        self._rewriting.review(entry)

    def _concerned(self, change: Change, sequence_entries: Collection[Entry] | None) -> list[Entry]:
        return [entry for entry in self._shelf.entries if in_scope(entry, change, sequence_entries)]

    def _is_pending(self, entry: Entry) -> bool:
        return self._mover.has(entry) or self._restorer.has(entry)

    def progress(self, owner: str | None = None) -> Progress:
        """Of all changes since the last time that none was under way, or of those that an owner asked for."""
        self.look()
        return total_of([change.progress() for change in self._asked_by(owner)])

    def _asked_by(self, owner: str | None) -> list[Requantizing]:
        return [change for change in self._asked if owner is None or change.owner == owner]

    def look(self) -> None:
        """Notice how far changes have got, by the entries that have changed, and which have ended."""
        for entry in self._changed.take():
            for change in self._asked:
                change.recount(entry)
        for change in self._asked:
            change.look()

    def _remove(self, entry: Entry) -> None:
        for change in self._asked:
            change.remove(entry)

    @property
    def is_running(self) -> bool:
        self.look()
        return any(change.is_running for change in self._asked)

    def cancel(self, owner: str | None = None) -> Progress:
        """All of them, or those that an owner asked for. What is not done yet stays as it is; every span is whole. New
        spans are stored as before the changes."""
        progress, cancelled = self.progress(owner), self._asked_by(owner)
        if owner is None:
            self._precision.target = self._target_before()
        for change in [change for change in cancelled if change.is_running]:
            # What runs may have nothing to be encoded now, and would later.
            for entry in [entry for entry in change.entries if entry.is_running or self._is_pending(entry)]:
                self._give_up(entry, change.plan)
        if owner is None:
            self._restorer.clear()
        self._asked = [change for change in self._asked if change not in cancelled]
        self._has_new_target()
        return progress

    def take_over(self, failed: Changes) -> None:
        """New spans are stored as those of a store that has failed were."""
        self._precision.target = failed._precision.target

    def _has_new_target(self) -> None:
        """What entries without a target of their own are to be stored as may be another plan now."""
        self._shelf.journal.note_all(self._shelf.entries)

    def _give_up(self, entry: Entry, plan: Plan) -> None:
        self._restorer.discard(entry)
        if entry.target is plan:
            self._mover.discard(entry)
            entry.target, entry.goes_up, entry.asked_at = None, False, None
            # One that waits to be trimmed still is.
            self._rewriting.review(entry)


def _is_lower(entry: Entry, plan: Plan) -> bool:
    """Whether it is stored in fewer bits than the plan has."""
    target = plan.token_bytes(entry.span.layout) * entry.span.num_tokens
    return not entry.is_running and entry.span.kv_bytes < RESTORE_SHARE * target
