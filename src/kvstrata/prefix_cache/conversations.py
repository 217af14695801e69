"""Conversations of each session: ends, and branches left behind."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

from kvstrata.prefix_cache.entries import Entry, Thread
from kvstrata.prefix_cache.entry_table import EntryTable, EvictionCandidates
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.radix_tree import Node

MAX_SESSIONS = 10_000

MAX_CONVERSATIONS = 8  # of one session

# The end of a first prompt that a later one need not have: how a reply begins may be rewritten with it.
REPLY_START_TOKENS = 16


class ConversationTracker:
    def __init__(self, shelf: EntryTable, leaves: EvictionCandidates, max_sessions: int = MAX_SESSIONS) -> None:
        self._shelf = shelf
        self._leaves = leaves
        self._max_sessions = max_sessions
        self.reply_start_tokens = REPLY_START_TOKENS
        self._sessions: OrderedDict[tuple[bytes, str], list[Thread]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin_turn(self, root_key: bytes, session: str, ids: TokenIds) -> Thread | None:
        """A session's next prompt: what it leaves behind is superseded from now on. Tells which thread goes on; None:
        the request has no session."""
        if not session:
            return None
        threads = self._sessions.get((root_key, session), [])
        match = self._shelf.tree.match(root_key, ids)
        shared = [_shared(match.path, thread.path(), match.num_tokens) for thread in threads]
        most = max(shared, default=0)
        if not most:
            return Thread(len(ids))
        thread = threads[shared.index(most)]
        if most < thread.first_end - self.reply_start_tokens:
            return Thread(len(ids))
        if most < thread.end:
            others = {node for each in threads if each is not thread for node in each.path()}
            self._supersede(self._behind(thread, most), session, others)
        return thread

    def end_turn(self, root_key: bytes, session: str, thread: Thread, path: Sequence[Node[Entry]], end: int) -> None:
        """A request of a thread has ended, with these nodes."""
        thread.nodes, thread.end = tuple(weakref.ref(node) for node in path), end
        threads = [each for each in self._sessions.get((root_key, session), []) if each is not thread]
        self._sessions[root_key, session] = [*threads[1 - MAX_CONVERSATIONS :], thread]
        self._sessions.move_to_end((root_key, session))
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def _behind(self, thread: Thread, position: int) -> list[Node[Entry]]:
        """The nodes of a thread from a position on; the one that it lies in is split there."""
        for node in thread.path():
            if node.start < position < node.end:
                self._shelf.split_node(node, position)
                break
        return [node for node in thread.path() if node.start >= position]

    def _supersede(self, nodes: Sequence[Node[Entry]], session: str, others: set[Node[Entry]]) -> None:
        for node in nodes:
            if node not in others:
                self._leaves.supersede(node, session)


def _shared(path: Sequence[Node[Entry]], others: Sequence[Node[Entry]], num_tokens: int) -> int:
    """How many tokens of a match are on another way too."""
    end = 0
    for node, other in zip(path, others, strict=False):
        if node is not other:
            break
        end = node.end
    return min(end, num_tokens)
