"""The sequences that wait and those that run, both by arrival. Knows who is where; does not know why."""

from __future__ import annotations

from kvstrata.engine.sequence import Sequence


class Sequences:
    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}  # by arrival

    @property
    def all(self) -> list[Sequence]:
        return [*self.waiting, *self.running.values()]

    @property
    def has_prompts(self) -> bool:
        """Whether one that runs still computes its prompt."""
        return any(sequence.prefill_left for sequence in self.running.values())

    @property
    def has_streams(self) -> bool:
        """Whether one that runs decodes."""
        return any(not sequence.prefill_left for sequence in self.running.values())

    @property
    def num_streams(self) -> int:
        """That have a token to come."""
        return sum(not s.prefill_left and s.tokens_wanted > 0 for s in self.running.values())

    def waiting_at(self, arrival: int) -> Sequence:
        return next(s for s in self.waiting if s.arrival == arrival)

    def start(self, sequence: Sequence) -> None:
        """One that waited runs. Age decides who gives way, and one that was set aside is older than those admitted
        since."""
        self.waiting.remove(sequence)
        running = sorted([*self.running.values(), sequence], key=lambda s: s.arrival)
        self.running.clear()
        self.running.update({s.arrival: s for s in running})

    def set_aside(self, sequence: Sequence) -> None:
        """One that ran waits."""
        del self.running[sequence.arrival]
        self.waiting = sorted([*self.waiting, sequence], key=lambda s: s.arrival)

    def let_go(self) -> None:
        """One that does not run in the next step would keep what was replaced in the store."""
        for sequence in self.running.values():
            if sequence.cache is not None:
                sequence.cache.let_go()
