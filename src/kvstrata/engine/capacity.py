"""How many bytes sequences and stored spans hold, how many are free, and how much room each sequence gets.

Knows the budget, the sequences that run and what is stored. Does not know who runs next.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.engine.memory import Budget
from kvstrata.engine.scheduler import tail_tokens
from kvstrata.engine.sequence import Sequence
from kvstrata.store.entry import Found
from kvstrata.store.shelf import Shelf


class Capacity:
    """`keeps_growth_free`: those that come leave room for the next growth of one that runs."""

    def __init__(
        self,
        budget: Budget,
        running: Mapping[int, Sequence],
        shelf: Shelf,
        *,
        tail_step_tokens: int,
        keeps_growth_free: bool,
    ) -> None:
        self.budget = budget  # replaced when the precision of what is to come changes
        self._running = running
        self._shelf = shelf
        self._tail_step_tokens = tail_step_tokens
        self.keeps_growth_free = keeps_growth_free

    @property
    def running_bytes(self) -> int:
        own_bytes = sum(self.budget.held_by(s.cache, s.rung) for s in self._running.values() if s.cache is not None)
        orphans = {span for s in self._running.values() for span in s.stored.orphans}
        return own_bytes + sum(span.nbytes for span in orphans)

    @property
    def stored_bytes(self) -> int:
        return self._shelf.held_bytes

    @property
    def free_bytes(self) -> int:
        """What is stored and may go is free."""
        leased_bytes = self._shelf.held_bytes - self._shelf.free_bytes
        return self.budget.total_bytes - self.running_bytes - leased_bytes

    # Room of one sequence.

    def first_tokens(self, sequence: Sequence, found_tokens: int, kept_bytes: int = 0) -> int:
        """That it gets room for when it begins. `kept_bytes`: of what it goes on from, as far as that is not leased
        yet."""
        known = len(sequence.tokens) - 1 - found_tokens
        tail = tail_tokens(known, sequence.tokens_wanted, self._tail_step_tokens)
        room = None if self._running else self.free_bytes - kept_bytes - self.budget.fixed_bytes
        return max(known + 1, self.budget.tail_tokens(known + tail, 0, sequence.rung, room))

    def first_tokens_that_fit(self, sequence: Sequence, found_tokens: int) -> int:
        """0: others need the memory. One that is alone was seen to fit when it came."""
        tokens = self.first_tokens(sequence, found_tokens)
        fits = not self._running or self.budget.bytes_for(tokens, sequence.rung) <= self.free_bytes
        return tokens if fits else 0

    def first_bytes(self, sequence: Sequence, found_tokens: int) -> int:
        return self.budget.bytes_for(self.first_tokens(sequence, found_tokens), sequence.rung)

    def admit_bytes(self, sequence: Sequence, found: Found) -> int:
        """All that it takes to let it in: its own room, and what it goes on from and would no longer be free."""
        kept_bytes = sum(entry.nbytes for entry in found.entries if entry.is_free)
        tokens = self.first_tokens(sequence, found.num_tokens, kept_bytes)
        return self.budget.bytes_for(tokens, sequence.rung) + kept_bytes

    def next_tokens(self, sequence: Sequence) -> int:
        """That it gets room for when it grows."""
        assert sequence.cache is not None
        capacity = sequence.cache.capacity
        tail = tail_tokens(capacity, sequence.tokens_wanted, self._tail_step_tokens)
        room = self.free_bytes if len(self._running) == 1 else None
        return max(1, self.budget.tail_tokens(tail, capacity, sequence.rung, room))

    def next_bytes(self, sequence: Sequence) -> int:
        assert sequence.cache is not None
        return self.budget.growth_bytes(self.next_tokens(sequence), sequence.cache.capacity, sequence.rung)

    def most_next_bytes(self) -> int:
        """Of the longest tail that one of those that run may add next."""
        growing = [s for s in self._running.values() if s.cache and s.tokens_wanted > s.cache.free_tokens]
        return max(map(self.next_bytes, growing), default=0)

    def left_bytes(self, growing_bytes: int) -> int:
        """For those that come, if those that run take so much more."""
        if not growing_bytes and self.keeps_growth_free:
            growing_bytes = self.most_next_bytes()
        return self.budget.total_bytes - self.running_bytes - growing_bytes
