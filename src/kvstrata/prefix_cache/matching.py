"""The longest usable cached prefix, and why it ends there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvstrata.kv.checkpoints import Checkpoint, needs_checkpoints, reaches
from kvstrata.kv.layout import Layout
from kvstrata.kv.span import SpanRange
from kvstrata.prefix_cache.entries import CachedPrefix, Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.keys import Identity, TokenIds, Tokens, as_ids, owner_key, root_key
from kvstrata.prefix_cache.radix_tree import Divergence, Match
from kvstrata.tiers.interface import PromptOnTier

NO_PREFIX = CachedPrefix(0, (), (), None, 0)

# complete  the whole prompt is cached but for its last token, which is always computed
# new       the cached tokens end there, and no request had the rest before
# diverged  the cached tokens continue in another way
# evicted   the next tokens were cached, and had to go
# mark      more tokens are cached, and the model has no checkpoint to resume from there
# damaged   the next block was on the disk, and its content was wrong
# salt      the next tokens are cached under another salt of the same caller
# empty     nothing is cached for this model and salt
# identity  nothing is cached, and the disk has blocks of other models, settings or salts only
# foreign   the model brings caches that cannot be shared
Ending = Literal["complete", "new", "diverged", "evicted", "mark", "damaged", "salt", "empty", "identity", "foreign"]


@dataclass(frozen=True)
class Explanation:
    """How much of a prompt is cached, and why not more."""

    prompt_tokens: int
    cached_tokens: int
    by_tier: dict[str, int]
    ends_because: Ending
    at_token: int  # the first that is not cached
    instead: tuple[tuple[int, ...], ...] = ()  # some continuations that are cached from that position on
    num_instead: int = 0  # how many continuations are cached
    remote_paused_because: str = ""  # why the tier that servers share is paused; empty: it is not


class PrefixMatcher:
    """Prefix matcher: finds the cached prefix of a prompt and explains where it ends. It has no state of its own."""

    def __init__(self, table: EntryTable, layout: Layout, identity: Identity) -> None:
        self._table = table
        self._can_share = all(spec.kind != "foreign" for spec in layout.flat())
        self._needs_checkpoints = needs_checkpoints(layout)
        self.layout = layout
        self.identity = identity

    def root_of(self, salt: str) -> bytes:
        """Return the key of the root under which the tokens of a salt are cached."""
        return root_key(self.identity, salt)

    def roots_begin(self, salt: str | None, owner: str | None) -> bytes:
        """Return the bytes that the keys of all roots of a salt or of an owner begin with; of all roots if both are
        None."""
        if salt is not None:
            return self.root_of(salt)
        return b"" if owner is None else owner_key(self.identity, owner)

    def find(self, ids: Tokens, salt: str) -> CachedPrefix:
        """Return the longest usable cached prefix of `ids`. The result protects no entry from eviction."""
        return self.find_under(self.root_of(salt), ids)

    def find_under(self, root_key: bytes, ids: Tokens) -> CachedPrefix:
        """Return the longest usable cached prefix of `ids` under a root."""
        match = self._table.tree.match(root_key, ids)
        usable, checkpoint = match.num_tokens, None
        if self._needs_checkpoints:
            checkpoint = _best_checkpoint(match, self.layout)
            usable = min(checkpoint.position, match.num_tokens) if checkpoint else 0
        if not usable:
            return replace(NO_PREFIX, matched_tokens=match.num_tokens)
        path = tuple(node for node in match.path if node.start < usable)
        entries = tuple(dict.fromkeys(node.payload for node in path))
        return CachedPrefix(usable, path, entries, checkpoint.position if checkpoint else None, match.num_tokens)

    def explain(
        self,
        ids: Tokens,
        salt: str,
        on_disk: PromptOnTier | None = None,
        in_shared: PromptOnTier | None = None,
        remote_paused_because: str = "",
    ) -> Explanation:
        """Explain how much of a prompt is cached, and why not more. The last token is always computed. `on_disk`,
        `in_shared`: what these tiers answered; None: they were not asked."""
        if not self._can_share:
            return Explanation(len(ids), 0, {}, "foreign", 0)
        computed, root = as_ids(ids)[:-1], self.root_of(salt)
        prefix = self.find_under(root, computed)
        by_tier = {"hot": prefix.num_tokens}
        if on_disk is not None:
            by_tier["disk"] = max(0, on_disk.num_tokens - prefix.num_tokens)
        if in_shared is not None:
            by_tier["remote"] = max(0, in_shared.num_tokens - sum(by_tier.values()))
        cached = sum(by_tier.values())
        divergence = self._table.tree.diverged(root, computed)
        because: Ending = "complete"
        if cached < len(computed):
            because = self._ending(root, computed, prefix, divergence)
        if on_disk is not None and because != "complete":
            because = _ending_on_disk(on_disk, because)
        at = cached if because == "mark" else max(cached, prefix.matched_tokens)
        if because != "diverged" or divergence.num_tokens != at:
            divergence = Divergence(at, (), 0, True)
        return Explanation(
            prompt_tokens=len(computed) + 1,
            cached_tokens=cached,
            by_tier=by_tier,
            ends_because=because,
            at_token=at,
            instead=divergence.instead,
            num_instead=divergence.num_instead,
            remote_paused_because=remote_paused_because,
        )

    def miss_reason(self, ids: Tokens, salt: str) -> str:
        """Return why no more of a prompt is in memory; empty for a model whose caches cannot be shared."""
        if not self._can_share:
            return ""
        computed, root = as_ids(ids)[:-1], self.root_of(salt)
        return self._ending(root, computed, self.find_under(root, computed), self._table.tree.diverged(root, computed))

    def _ending(self, root: bytes, computed: TokenIds, prefix: CachedPrefix, divergence: Divergence) -> Ending:
        """Return why the cached prefix ends. `computed`: the prompt without its last token."""
        if prefix.num_tokens == len(computed):
            return "complete"
        if self._table.ghosts.match(root, computed).num_tokens > prefix.matched_tokens:
            return "evicted"
        if prefix.matched_tokens > prefix.num_tokens:
            return "mark"
        if not divergence.is_root_known:
            return "empty"
        return "diverged" if divergence.instead else "new"


def checkpoint_of(prefix: CachedPrefix) -> Checkpoint | None:
    """Return the checkpoint that a prefix is resumed from; None: its model needs none."""
    position = prefix.checkpoint_at
    if position is None:
        return None
    # The last node before the position has it: nodes above may have another branch's at the same position.
    holder = next(
        n.payload for n in reversed(prefix.path) if n.start < position and position in n.payload.span.checkpoints
    )
    return holder.span.checkpoints[position]


def ranges_of(prefix: CachedPrefix) -> tuple[SpanRange, ...]:
    """Return the spans of a prefix, as they are now. Neighbouring nodes of one span are one range."""
    ranges: list[SpanRange] = []
    for node in prefix.path:
        end = min(node.end, prefix.num_tokens)
        if end <= node.start:
            break
        span = node.payload.span
        if ranges and ranges[-1].span is span:
            ranges[-1] = SpanRange(span, ranges[-1].start, end)
        else:
            ranges.append(SpanRange(span, node.start, end))
    return tuple(ranges)


def _best_checkpoint(match: Match[Entry], layout: Layout) -> Checkpoint | None:
    """Return the checkpoint from which a request resumes with the most tokens; None: the path has none."""
    for node in reversed(match.path):
        end = min(node.end, match.num_tokens)
        checkpoints = [each for at, each in node.payload.span.checkpoints.items() if node.start < at]
        # A checkpoint after the end will do for a model whose rings were not full by then.
        if end == match.num_tokens and (later := [each for each in checkpoints if reaches(each, layout, end)]):
            return min(later, key=lambda each: each.position)
        if usable := [each for each in checkpoints if each.position <= end]:
            return max(usable, key=lambda each: each.position)
    return None


def _ending_on_disk(on_disk: PromptOnTier, because: Ending) -> Ending:
    """Refine the reason of an ending by what the disk answered."""
    if on_disk.is_damaged_next:
        return "damaged"
    return "identity" if because == "empty" and on_disk.has_others_only else because
