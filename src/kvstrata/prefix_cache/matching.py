"""The longest usable cached prefix, and why it ends there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvstrata.layers.kinds import Layout
from kvstrata.prefix_cache.entries import CachedPrefix, Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.keys import Identity, TokenIds, Tokens, as_ids, owner_key, root_key
from kvstrata.prefix_cache.radix_tree import Divergence, Match
from kvstrata.spans.marks import Mark, needs_marks, reaches
from kvstrata.spans.span import SpanRange
from kvstrata.tier.chains import OnDisk

NO_PREFIX = CachedPrefix(0, (), (), None, 0)


class PrefixMatcher:
    def __init__(self, shelf: EntryTable, layout: Layout, identity: Identity) -> None:
        self._shelf = shelf
        self.layout = layout
        self._needs_checkpoints = needs_marks(layout)
        self.identity = identity

    def root_of(self, salt: str) -> bytes:
        return root_key(self.identity, salt)

    def roots_begin(self, salt: str | None, owner: str | None) -> bytes:
        """What the roots have in common that are under a salt, an owner, or any."""
        if salt is not None:
            return self.root_of(salt)
        return b"" if owner is None else owner_key(self.identity, owner)

    def find(self, tokens: Tokens, salt: str) -> CachedPrefix:
        """What a match would give now. Keeps nothing from going."""
        return self.find_under(self.root_of(salt), tokens)

    def find_under(self, root_key: bytes, tokens: Tokens) -> CachedPrefix:
        """For a caller that has the root already."""
        match = self._shelf.tree.match(root_key, tokens)
        return _found(match, self.layout if self._needs_checkpoints else None)


def _found(match: Match[Entry], layout: Layout | None) -> CachedPrefix:
    """`layout`: of a model that can be resumed at marks only."""
    usable, mark = match.num_tokens, None
    if layout is not None:
        mark = _best_checkpoint(match, layout)
        usable = min(mark.position, match.num_tokens) if mark else 0
    if not usable:
        return replace(NO_PREFIX, matched_tokens=match.num_tokens)
    path = tuple(node for node in match.path if node.start < usable)
    entries = tuple(dict.fromkeys(node.payload for node in path))
    return CachedPrefix(usable, path, entries, mark.position if mark else None, match.num_tokens)


def checkpoint_of(found: CachedPrefix) -> Mark | None:
    position = found.checkpoint_at
    if position is None:
        return None
    # The last node that comes before it: those above may have one at the same position on another branch.
    holder = next(n.payload for n in reversed(found.path) if n.start < position and position in n.payload.span.marks)
    return holder.span.marks[position]


def _best_checkpoint(match: Match[Entry], layout: Layout) -> Mark | None:
    for node in reversed(match.path):
        end = min(node.end, match.num_tokens)
        marks = [mark for at, mark in node.payload.span.marks.items() if node.start < at]
        # A later one of this span will do for a model whose rings were not full by then.
        if end == match.num_tokens and (later := [mark for mark in marks if reaches(mark, layout, end)]):
            return min(later, key=lambda mark: mark.position)
        if usable := [mark for mark in marks if mark.position <= end]:
            return max(usable, key=lambda mark: mark.position)
    return None


def ranges_of(found: CachedPrefix) -> tuple[SpanRange, ...]:
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


# complete  all that can be found was: the last prompt token is always computed
# new       what is stored ends there: the rest was never seen
# diverged  something else is stored there
# evicted   it was stored, and had to go
# mark      more is stored, but the model cannot be resumed there
# damaged   the next block was on the disk, and was not what it said
# salt      it is stored under another salt of the same caller
# empty     nothing is stored for this model and salt
# identity  nothing is; the disk has blocks of other models, settings or salts only
# foreign   the model brings caches that cannot be shared
Ending = Literal["complete", "new", "diverged", "evicted", "mark", "damaged", "salt", "empty", "identity", "foreign"]


@dataclass(frozen=True)
class Explanation:
    prompt_tokens: int
    cached_tokens: int
    by_tier: dict[str, int]
    ends_because: Ending
    at_token: int  # the first that is not cached
    instead: tuple[tuple[int, ...], ...] = ()  # how what is stored goes on from that position: a few ways
    num_instead: int = 0  # how many ways there are
    remote_paused_because: str = ""  # why the tier that servers share is left alone; empty: it is not


class Explainer:
    def __init__(self, shelf: EntryTable, search: PrefixMatcher) -> None:
        self._shelf = shelf
        self._search = search

    def explain(
        self,
        tokens: Tokens,
        salt: str,
        on_disk: OnDisk | None = None,
        in_shared: OnDisk | None = None,
        remote_paused_because: str = "",
    ) -> Explanation:
        """Explain how much of a prompt is cached, and why not more. The last token is always computed. `on_disk`,
        `in_shared`: the answers of these tiers; None: they were not asked."""
        ids, key = as_ids(tokens)[:-1], self._search.root_of(salt)
        found = self._search.find(ids, salt)
        by_tier = {"hot": found.num_tokens}
        if on_disk is not None:
            by_tier["disk"] = max(0, on_disk.num_tokens - found.num_tokens)
        if in_shared is not None:
            by_tier["remote"] = max(0, in_shared.num_tokens - sum(by_tier.values()))
        cached = sum(by_tier.values())
        diverged = self._shelf.tree.diverged(key, ids)
        because: Ending = "complete" if cached == len(ids) else self._ending(key, ids, found, diverged)
        if on_disk is not None and because != "complete":
            because = _ending_on_disk(on_disk, because)
        at = cached if because == "mark" else max(cached, found.matched_tokens)
        parted = diverged if because == "diverged" and diverged.num_tokens == at else Divergence(at, (), 0, True)
        instead = parted.instead, parted.num_instead
        return Explanation(len(ids) + 1, cached, by_tier, because, at, *instead, remote_paused_because)

    def miss(self, tokens: Tokens, salt: str) -> str:
        """Why not more of a prompt is in memory."""
        ids, key = as_ids(tokens)[:-1], self._search.root_of(salt)
        return self._ending(key, ids, self._search.find(ids, salt), self._shelf.tree.diverged(key, ids))

    def _ending(self, key: bytes, ids: TokenIds, found: CachedPrefix, diverged: Divergence) -> Ending:
        """`ids`: a prompt but for its last token."""
        if found.num_tokens == len(ids):
            return "complete"
        if self._shelf.ghosts.match(key, ids).num_tokens > found.matched_tokens:
            return "evicted"
        if found.matched_tokens > found.num_tokens:
            return "mark"
        if not diverged.is_root_known:
            return "empty"
        return "diverged" if diverged.instead else "new"


class ForeignExplainer(Explainer):
    """Of a model whose caches cannot be shared."""

    def explain(
        self,
        tokens: Tokens,
        salt: str,
        on_disk: OnDisk | None = None,
        in_shared: OnDisk | None = None,
        remote_paused_because: str = "",
    ) -> Explanation:
        del salt, on_disk, in_shared, remote_paused_because
        return Explanation(len(tokens), 0, {}, "foreign", 0)

    def miss(self, tokens: Tokens, salt: str) -> str:
        del tokens, salt
        return ""


def _ending_on_disk(on_disk: OnDisk, because: Ending) -> Ending:
    if on_disk.is_damaged_next:
        return "damaged"
    return "identity" if because == "empty" and on_disk.has_others_only else because
