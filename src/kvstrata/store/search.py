"""The longest usable match of a prompt: over all that is stored, at any token that the model can resume at."""

from __future__ import annotations

from dataclasses import replace

from kvstrata.index.identity import Identity, owner_key, root_key
from kvstrata.index.ids import Tokens
from kvstrata.index.tree import Match
from kvstrata.layers.kinds import Layout
from kvstrata.spans.marks import Mark, needs_marks, reaches
from kvstrata.spans.span import SpanRange
from kvstrata.store.entry import Entry, Found
from kvstrata.store.shelf import Shelf

NOTHING = Found(0, (), (), None, 0)


class Search:
    def __init__(self, shelf: Shelf, layout: Layout, identity: Identity) -> None:
        self._shelf = shelf
        self.layout = layout
        self._needs_marks = needs_marks(layout)
        self.identity = identity

    def root_of(self, salt: str) -> bytes:
        return root_key(self.identity, salt)

    def roots_begin(self, salt: str | None, owner: str | None) -> bytes:
        """What the roots have in common that are under a salt, an owner, or any."""
        if salt is not None:
            return self.root_of(salt)
        return b"" if owner is None else owner_key(self.identity, owner)

    def find(self, tokens: Tokens, salt: str) -> Found:
        """What a match would give now. Keeps nothing from going."""
        return self.find_under(self.root_of(salt), tokens)

    def find_under(self, root_key: bytes, tokens: Tokens) -> Found:
        """For a caller that has the root already."""
        match = self._shelf.tree.match(root_key, tokens)
        return _found(match, self.layout if self._needs_marks else None)


def _found(match: Match[Entry], layout: Layout | None) -> Found:
    """`layout`: of a model that can be resumed at marks only."""
    usable, mark = match.num_tokens, None
    if layout is not None:
        mark = _best_mark(match, layout)
        usable = min(mark.position, match.num_tokens) if mark else 0
    if not usable:
        return replace(NOTHING, matched_tokens=match.num_tokens)
    path = tuple(node for node in match.path if node.start < usable)
    entries = tuple(dict.fromkeys(node.payload for node in path))
    return Found(usable, path, entries, mark.position if mark else None, match.num_tokens)


def mark_of(found: Found) -> Mark | None:
    position = found.mark_position
    if position is None:
        return None
    # The last node that comes before it: those above may have one at the same position on another branch.
    holder = next(n.payload for n in reversed(found.path) if n.start < position and position in n.payload.span.marks)
    return holder.span.marks[position]


def _best_mark(match: Match[Entry], layout: Layout) -> Mark | None:
    for node in reversed(match.path):
        end = min(node.end, match.num_tokens)
        marks = [mark for at, mark in node.payload.span.marks.items() if node.start < at]
        # A later one of this span will do for a model whose rings were not full by then.
        if end == match.num_tokens and (later := [mark for mark in marks if reaches(mark, layout, end)]):
            return min(later, key=lambda mark: mark.position)
        if usable := [mark for mark in marks if mark.position <= end]:
            return max(usable, key=lambda mark: mark.position)
    return None


def ranges_of(found: Found) -> tuple[SpanRange, ...]:
    """Return the spans of a match, as they are now. Neighbouring nodes of one span are one range."""
    ranges: list[SpanRange] = []
    for node in found.path:
        end = min(node.end, found.num_tokens)
        if end <= node.start:
            break
        span = node.payload.span
        if ranges and ranges[-1].span is span:
            ranges[-1] = SpanRange(span, ranges[-1].start, end)
        else:
            ranges.append(SpanRange(span, node.start, end))
    return tuple(ranges)
