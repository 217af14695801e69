"""Marks of stored spans: where models that cannot step back are resumed. How many are kept, and which go."""

from __future__ import annotations

from collections.abc import Iterable

from kvstrata.index.tree import Node
from kvstrata.spans.marks import Mark
from kvstrata.store.entry import Entry
from kvstrata.store.shelf import Shelf


class Marks:
    """`are_needed`: the model can be resumed at marks only. `most`: on the way from the first token to the end."""

    def __init__(self, shelf: Shelf, most: int, *, are_needed: bool) -> None:
        self._shelf = shelf
        self._most = most
        self.are_needed = are_needed

    def add(self, path: tuple[Node[Entry], ...], mark: Mark, resume_at: Iterable[int] = ()) -> None:
        """To the entry that holds the token before it. `resume_at`: where the conversation will be taken up again; the
        last mark before each of these stays while newer ones come."""
        holder = next(node.payload for node in path if node.start < mark.position <= node.end)
        if mark.position in holder.span.marks:
            return
        self._shelf.version += 1
        holder.span.marks[mark.position] = mark
        self._shelf.recount(holder)
        self._thin(path, resume_at)

    def drop(self, entries: Iterable[Entry], keep: int | None = None) -> bool:
        """All but the one at `keep`, and those that are pinned. False: there are none."""
        dropped = False
        for entry in entries:
            kept = {at: mark for at, mark in entry.span.marks.items() if at == keep or entry.is_pinned}
            if len(kept) < len(entry.span.marks):
                dropped = True
                entry.span.marks = kept
                self._shelf.recount(entry)
        self._shelf.version += dropped
        return dropped

    def usable_end(self, leaf: Node[Entry], end: int) -> int:
        """How much of what a leaf has before `end` can be resumed: nothing after its last mark, if marks are needed."""
        if not self.are_needed:
            return end
        return max((at for at in leaf.payload.span.marks if leaf.start < at <= end), default=leaf.start)

    def _thin(self, path: tuple[Node[Entry], ...], resume_at: Iterable[int]) -> None:
        """Keep the newest on a path, those where it branches, which is where requests resume, those that are needed
        for `resume_at`, and those that are pinned. What its entries hold on other branches is not touched."""
        on_path = [(at, node) for node in path for at in node.payload.span.marks if node.start < at <= node.end]
        kept = {node.end for node in path if len(node.children) > 1}
        kept |= {max((at for at, _ in on_path if at <= position), default=0) for position in resume_at}
        held = [(at, node.payload) for at, node in on_path if at not in kept and not node.payload.is_pinned]
        for at, entry in sorted(held, key=lambda place: place[0])[: max(0, len(held) - self._most)]:
            del entry.span.marks[at]
            self._shelf.recount(entry)
