"""What follows when a span has come to what it should be stored as."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.store.entry import Entry
from kvstrata.store.precision.rewriting import Rewriting
from kvstrata.store.shelf import Shelf

# On the way from the first token to the end of a conversation.
MAX_SPANS = 8


class Tidying:
    """`settled` is called with every entry that has ended and has come to what it should be stored as."""

    def __init__(
        self,
        shelf: Shelf,
        rewriting: Rewriting,
        settled: Callable[[Entry], None],
    ) -> None:
        self._shelf = shelf
        self._rewriting = rewriting
        self._settled = settled

    def tidy(self, entry: Entry) -> None:
        """Few and long spans are read faster than many short ones."""
        # Unless something else was asked for meanwhile, or it has grown.
        self._rewriting.review(entry)
        if entry.is_running or not entry.nodes:
            return
        last = entry.last_node
        for grown in self._shelf.join_along(last, MAX_SPANS):
            self._rewriting.review(grown)
        # It may have been joined to what comes before it.
        self._settled(last.payload)
