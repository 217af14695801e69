"""Conversation tracking: the tokens of each session's conversations, and the branches that they left behind.

A session's next prompt may diverge from its last prompt and reply, for example because a client drops thinking or
edits a message. Only that session ever used the tokens behind the divergence, so they become superseded: eviction takes
them first, and they are not written to the disk.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvstrata.common_prefix import common_prefix_len
from kvstrata.prefix_cache.entry_table import EntryTable, EvictionCandidates
from kvstrata.prefix_cache.keys import TokenIds, owner_of
from kvstrata.prefix_cache.matching import PrefixMatcher

MAX_SESSIONS = 10_000

MAX_CONVERSATIONS = 8  # per session

MAX_IDS = 16 << 20  # of all sessions: 64 MiB

# A prompt may diverge this close to the end of a conversation's first prompt and still continue that conversation: a
# template may rewrite the start of a reply.
REPLY_START_TOKENS = 16

# Ids on each side of a divergence that are reported.
CONTEXT_IDS = 12


@dataclass(frozen=True)
class ConversationTurn:
    """A turn from its beginning to its end."""

    conversation_id: int
    first_end: int  # end of the conversation's first prompt


@dataclass(frozen=True, eq=False)
class Conversation:
    """Last turn of a conversation."""

    id: int  # stays from turn to turn
    digest: bytes  # of how its first request began; empty: not known
    ids: TokenIds  # prompt and reply as sampled, with the last token, which is never computed
    num_prompt: int  # ids of the prompt
    first_end: int  # end of its first prompt


@dataclass(frozen=True)
class PromptDivergence:
    """Position where a prompt diverged from the last turn of its conversation, and the ids around it."""

    at: int  # the first token that differs
    where: Literal["prompt", "reply"]  # of the last turn
    before: tuple[int, ...]  # both have these before it
    was: tuple[int, ...]  # from there on, in the last turn
    now: tuple[int, ...]  # from there on, in the prompt


@dataclass(frozen=True, eq=False)
class TrackedConversation:
    """Tokens of a conversation, and how long its session was not used."""

    salt: str
    session: str
    ids: TokenIds
    unused_s: float


@dataclass(frozen=True, eq=False)
class _TrackedSession:
    """Conversations of one session."""

    owner: str
    used_s: float
    conversations: tuple[Conversation, ...]  # the newest first

    @property
    def num_ids(self) -> int:
        return sum(len(conversation.ids) for conversation in self.conversations)


class ConversationTracker:
    """Conversations of each session, and the rule that supersedes the branches they left.

    A conversation is recognized by its first prompt. Several agents may therefore share a session: a prompt that
    diverges earlier starts another conversation and supersedes nothing.

    A turn begins when its request starts and ends with the request, however that ends: what a client cancelled was
    computed, too. Turns of one session may overlap: each ends in the conversation in which it began. The least recently
    used sessions are forgotten first, and the oldest conversations of a session.
    """

    def __init__(
        self,
        table: EntryTable,
        candidates: EvictionCandidates,
        matcher: PrefixMatcher,
        ttl_s: float | None,
        clock: Callable[[], float],
        *,
        max_sessions: int = MAX_SESSIONS,
        max_ids: int = MAX_IDS,
    ) -> None:
        self._table = table
        self._candidates = candidates
        self._matcher = matcher
        self._ttl_s = math.inf if ttl_s is None else ttl_s
        self._clock = clock
        self._max_sessions = max_sessions
        self._max_ids = max_ids
        self.reply_start_tokens = REPLY_START_TOKENS
        self._sessions: OrderedDict[tuple[str, str], _TrackedSession] = OrderedDict()  # the newest last
        self.num_ids = 0  # of all conversations
        self._num_conversations = 0  # since the start: ids of conversations

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._sessions)

    # Turns.

    def begin_turn(self, salt: str, session: str, ids: TokenIds) -> ConversationTurn:
        """Supersede the branch that a prompt leaves behind, and return the turn. Requests without a session leave no
        branch."""
        known = self.conversations_of(salt, session)
        continued = self._continued_by(ids, known)
        if continued is not None:
            others = [conversation for conversation in known if conversation is not continued]
            self._supersede_branch(salt, session, continued, ids, others)
        return self._turn_of(continued, len(ids))

    def end_turn(
        self, salt: str, session: str, turn: ConversationTurn, digest: bytes, ids: TokenIds, num_prompt: int
    ) -> None:
        """Record a prompt and its reply as the last turn of the conversation. Requests without a session are not
        recorded."""
        if not session:
            return
        kept_ids = ids.view()
        kept_ids.flags.writeable = False
        ended = Conversation(turn.conversation_id, digest, kept_ids, num_prompt, turn.first_end)
        others = [each for each in self.conversations_of(salt, session) if each.id != ended.id]
        conversations = (ended, *others)[:MAX_CONVERSATIONS]
        self._remove_session((salt, session))
        tracked = self._sessions[salt, session] = _TrackedSession(owner_of(salt), self._clock(), conversations)
        self.num_ids += tracked.num_ids
        while self.num_ids > self._max_ids or len(self._sessions) > self._max_sessions:
            self._remove_session(next(iter(self._sessions)))

    def adopt_conversation(self, salt: str, session: str, digest: bytes, ids: TokenIds, num_prompt: int) -> None:
        """Record the last turn of a conversation that was served elsewhere."""
        continued = self._continued_by(ids[:num_prompt], self.conversations_of(salt, session))
        self.end_turn(salt, session, self._turn_of(continued, num_prompt), digest, ids, num_prompt)

    def _turn_of(self, continued: Conversation | None, num_prompt: int) -> ConversationTurn:
        if continued is not None:
            return ConversationTurn(continued.id, continued.first_end)
        self._num_conversations += 1
        return ConversationTurn(self._num_conversations, num_prompt)

    def _continued_by(self, ids: TokenIds, known: Sequence[Conversation]) -> Conversation | None:
        """Return the conversation that a prompt continues, the newest of several; None: the prompt begins another."""
        shared = [common_prefix_len(conversation.ids, ids) for conversation in known]
        longest = max(shared, default=0)
        if not longest:
            return None
        conversation = known[shared.index(longest)]
        return conversation if longest >= conversation.first_end - self.reply_start_tokens else None

    def _supersede_branch(
        self, salt: str, session: str, conversation: Conversation, ids: TokenIds, others: Sequence[Conversation]
    ) -> None:
        """Supersede the cached tokens of a conversation that neither a prompt nor another conversation shares."""
        branches = (ids, *(other.ids for other in others))
        branch_start = max(common_prefix_len(conversation.ids, branch) for branch in branches)
        match = self._table.tree.match(self._matcher.root_of(salt), conversation.ids)
        if branch_start >= match.num_tokens:
            return
        # A last node that matches only in part stays: another request, which has the rest of it, may still need it.
        nodes = [node for node in match.path if branch_start < node.end <= match.num_tokens]
        if nodes and nodes[0].start < branch_start:
            self._table.split_node(nodes[0], branch_start)  # the lower half is the same node
        for node in nodes:
            self._candidates.supersede(node, session)

    # Questions.

    def divergence(self, salt: str, session: str, digest: bytes, ids: TokenIds) -> PromptDivergence | None:
        """Return where a prompt diverges from the last turn of the conversation that began in the same way, otherwise
        of the newest one. None: the prompt continues that turn or is its beginning, or none is known."""
        known = self.conversations_of(salt, session)
        own = (conversation for conversation in known if digest and conversation.digest == digest)
        last = next(own, next(iter(known), None))
        if last is None:
            return None
        at = common_prefix_len(last.ids, ids)
        if at in (len(ids), len(last.ids)):
            return None
        runs = (ids[max(0, at - CONTEXT_IDS) : at], last.ids[at : at + CONTEXT_IDS], ids[at : at + CONTEXT_IDS])
        before, was, now = (tuple(run.tolist()) for run in runs)
        return PromptDivergence(at, "prompt" if at < last.num_prompt else "reply", before, was, now)

    def conversations_of(self, salt: str, session: str) -> tuple[Conversation, ...]:
        """Return the conversations of a session, the newest first."""
        self.expire()
        tracked = self._sessions.get((salt, session))
        return () if tracked is None else tracked.conversations

    def longest(self, salt: str, session: str) -> Conversation | None:
        """Return the longest conversation of a session. None: it has none, or they were forgotten."""
        return max(self.conversations_of(salt, session), key=lambda conversation: len(conversation.ids), default=None)

    def newest(self, owner: str | None, max_sessions: int) -> list[TrackedConversation]:
        """Return the conversations of the sessions that were used last, under an owner's salts or under all (None)."""
        self.expire()
        now_s = self._clock()
        own = reversed(self._sessions.items())
        if owner is not None:
            own = (each for each in own if each[1].owner == owner)
        return [
            TrackedConversation(salt, session, conversation.ids, now_s - tracked.used_s)
            for (salt, session), tracked in islice(own, max_sessions)
            for conversation in tracked.conversations
        ]

    # Forgetting.

    def forget(self, salt: str | None, owner: str | None) -> None:
        """Forget the conversations under a salt, under all salts of an owner, or all."""
        for key, tracked in list(self._sessions.items()):
            if key[0] == salt or (salt is None and owner in (None, tracked.owner)):
                self._remove_session(key)

    def expire(self) -> None:
        """Forget the sessions that were not used within the TTL."""
        while self._sessions and self.seconds_to_expiry() <= 0:
            self._remove_session(next(iter(self._sessions)))

    def seconds_to_expiry(self) -> float:
        """Return the seconds until the next session expires; infinite if none will."""
        if not self._sessions or self._ttl_s == math.inf:
            return math.inf
        return max(0.0, next(iter(self._sessions.values())).used_s + self._ttl_s - self._clock())

    def take_over(self, failed: ConversationTracker) -> None:
        """Adopt the conversations of a failed cache."""
        self._sessions, self.num_ids = failed._sessions, failed.num_ids
        self._num_conversations = failed._num_conversations

    def _remove_session(self, key: tuple[str, str]) -> None:
        removed = self._sessions.pop(key, None)
        self.num_ids -= 0 if removed is None else removed.num_ids
