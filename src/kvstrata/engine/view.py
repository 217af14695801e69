"""Sequences as the scheduler sees them: values that follow from what they find, hold and need."""

from __future__ import annotations

from kvstrata.engine.capacity import Capacity
from kvstrata.engine.fetching import Fetching
from kvstrata.engine.resume import Resume
from kvstrata.engine.scheduler import Running, Waiting
from kvstrata.engine.sequence import Sequence
from kvstrata.engine.sequences import Sequences

# Waiting requests that are looked at past those that could be admitted: some may wait for the prefill of another.
MAX_FOLLOWERS = 16


class View:
    def __init__(self, sequences: Sequences, capacity: Capacity, resume: Resume, fetching: Fetching) -> None:
        self._sequences = sequences
        self._capacity = capacity
        self._resume = resume
        self._fetching = fetching
        self.awaits_encoding = False  # a request waits until what it would go on from is encoded

    def look(self, max_running: int, prefill_tokens_s: float) -> list[Waiting]:
        """Those that could be admitted now, and a few more: what the store has for the others need not be known yet.
        Goes on with what the disk has for them."""
        running = self._sequences.running
        ahead = [s for s in running.values() if s.prefill_left]
        waiting = []
        self.awaits_encoding = False
        for sequence in self._sequences.waiting[: max(0, max_running - len(running)) + MAX_FOLLOWERS]:
            self._fetching.fetch(sequence, prefill_tokens_s)
            waiting.append(self._waiting(sequence, ahead))
            ahead.append(sequence)
        return waiting

    def _waiting(self, sequence: Sequence, ahead: list[Sequence]) -> Waiting:
        found = self._resume.found(sequence)
        awaits_encoding = self._resume.awaits_encoding(sequence)
        self.awaits_encoding = self.awaits_encoding or awaits_encoding
        return Waiting(
            sequence.arrival,
            admit_bytes=self._capacity.admit_bytes(sequence, found),
            prefill_left=len(sequence.tokens) - 1 - found.num_tokens,
            chunk_limit=self._resume.next_stop(sequence, found.num_tokens),
            context=found.num_tokens,
            follows=awaits_encoding or self._fetching.awaits_disk(sequence) or self._resume.follow(sequence, ahead),
        )

    def running(self) -> list[Running]:
        return [self.running_one(sequence) for sequence in self._sequences.running.values()]

    def running_one(self, sequence: Sequence) -> Running:
        assert sequence.cache is not None
        complete = sequence.tokens_wanted == 0
        full = not sequence.cache.free_tokens and not complete
        return Running(
            sequence.arrival,
            held_bytes=self._capacity.budget.held_by(sequence.cache, sequence.rung),
            prefill_left=sequence.prefill_left,
            chunk_limit=self._resume.next_stop(sequence, sequence.num_computed),
            grow_bytes=self._capacity.next_bytes(sequence) if full else 0,
            complete=complete,
            context=sequence.num_computed,
        )

    def first_bytes(self, sequence: Sequence) -> int:
        """What one that waits takes when it begins."""
        return self._capacity.first_bytes(sequence, self._resume.found(sequence).num_tokens)

    def drop_marks(self, sequence: Sequence) -> bool:
        """Of one that has no room to grow. False: it has none."""
        return self._resume.drop_marks(sequence)
