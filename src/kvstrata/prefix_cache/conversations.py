"""Conversation tracking: where the conversations of each session ended, and which branches they left behind.

A session's next prompt may diverge from its last prompt and reply, for example because a client drops thinking or
edits a message. Only that session ever used the tokens behind the divergence, so they become superseded: eviction takes
them first, and they are not written to the disk.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

from kvstrata.prefix_cache.entries import Conversation, Entry
from kvstrata.prefix_cache.entry_table import EntryTable, EvictionCandidates
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.radix_tree import Node

MAX_SESSIONS = 10_000

MAX_CONVERSATIONS = 8  # per session

# A prompt may diverge this close to the end of a conversation's first prompt and still continue that conversation: a
# template may rewrite the start of a reply.
REPLY_START_TOKENS = 16


class ConversationTracker:
    """Conversations of each session, and the rule that supersedes the branches they left.

    A conversation is recognized by its first prompt. Several agents may therefore share a session: a prompt that
    diverges earlier starts another conversation and supersedes nothing. The least recently used sessions are forgotten
    first, and the oldest conversations of a session.
    """

    def __init__(self, table: EntryTable, candidates: EvictionCandidates, max_sessions: int = MAX_SESSIONS) -> None:
        self._table = table
        self._candidates = candidates
        self._max_sessions = max_sessions
        self.reply_start_tokens = REPLY_START_TOKENS
        self._sessions: OrderedDict[tuple[bytes, str], list[Conversation]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin_turn(self, root_key: bytes, session: str, ids: TokenIds) -> Conversation | None:
        """Return the conversation that a prompt continues, or a new one, and supersede the branch left behind.

        Returns None for a request without a session.
        """
        if not session:
            return None
        conversations = self._sessions.get((root_key, session), [])
        match = self._table.tree.match(root_key, ids)
        num_shared = [
            _num_shared_tokens(match.path, conversation.path(), match.num_tokens) for conversation in conversations
        ]
        divergence = max(num_shared, default=0)
        if not divergence:
            return Conversation(len(ids))
        conversation = conversations[num_shared.index(divergence)]
        if divergence < conversation.first_end - self.reply_start_tokens:
            return Conversation(len(ids))
        if divergence < conversation.end:
            nodes_of_others = {node for other in conversations if other is not conversation for node in other.path()}
            self._supersede_nodes(self._nodes_from(conversation, divergence), session, nodes_of_others)
        return conversation

    def end_turn(
        self, root_key: bytes, session: str, conversation: Conversation, path: Sequence[Node[Entry]], end: int
    ) -> None:
        """Record the end of a request: the nodes of its prompt and reply, and their last position."""
        conversation.nodes, conversation.end = tuple(weakref.ref(node) for node in path), end
        others = [other for other in self._sessions.get((root_key, session), []) if other is not conversation]
        self._sessions[root_key, session] = [*others[1 - MAX_CONVERSATIONS :], conversation]
        self._sessions.move_to_end((root_key, session))
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def _nodes_from(self, conversation: Conversation, position: int) -> list[Node[Entry]]:
        """Return the nodes of a conversation from a position on. A node that contains the position is split there."""
        for node in conversation.path():
            if node.start < position < node.end:
                self._table.split_node(node, position)
                break
        return [node for node in conversation.path() if node.start >= position]

    def _supersede_nodes(self, nodes: Sequence[Node[Entry]], session: str, nodes_of_others: set[Node[Entry]]) -> None:
        for node in nodes:
            if node not in nodes_of_others:
                self._candidates.supersede(node, session)


def _num_shared_tokens(path: Sequence[Node[Entry]], other_path: Sequence[Node[Entry]], num_tokens: int) -> int:
    """Return how many of a match's first `num_tokens` tokens are on another path too."""
    end = 0
    for node, other in zip(path, other_path, strict=False):
        if node is not other:
            break
        end = node.end
    return min(end, num_tokens)
