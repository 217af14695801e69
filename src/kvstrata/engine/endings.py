"""How sequences end: their memory goes back, what they computed stays in the store, and their client is told."""

from __future__ import annotations

import time

from kvstrata.engine.entrance import Entrance
from kvstrata.engine.fetching import Fetching
from kvstrata.engine.request import Failed, Finished, FinishReason
from kvstrata.engine.resume import Resume
from kvstrata.engine.runner import Runner
from kvstrata.engine.sequence import Sequence
from kvstrata.engine.sequences import Sequences
from kvstrata.metrics import Metrics


class Endings:
    def __init__(
        self,
        sequences: Sequences,
        resume: Resume,
        fetching: Fetching,
        entrance: Entrance,
        runner: Runner,
        metrics: Metrics,
    ) -> None:
        self._sequences = sequences
        self._resume = resume
        self._fetching = fetching
        self._entrance = entrance
        self._runner = runner
        self._metrics = metrics

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._remove(sequence)
        self._metrics.requests.labels(outcome=reason).inc()
        self._metrics.request_s.observe(time.monotonic() - sequence.submitted_s)
        sequence.end(Finished(reason, sequence.usage, sequence.stop_found, sequence.reply_ids))

    def fail(self, sequence: Sequence, failed: Failed) -> None:
        self._remove(sequence)
        self._tell_failure(sequence, failed)

    def end(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """Before the model ends it."""
        for sequence in self._sequences.all:
            if sequence.request.id == request_id:
                self.finish(sequence, reason)

    def fail_all(self, message: str) -> None:
        """End everything that runs or waits, and start from nothing."""
        self._runner.abandon()
        sequences = self._sequences.all
        self._sequences.waiting = []
        self._sequences.running.clear()
        for sequence in sequences:
            self._fetching.forget(sequence)
            self._tell_failure(sequence, Failed(message))

    def _tell_failure(self, sequence: Sequence, failed: Failed) -> None:
        self._metrics.requests.labels(outcome="failed").inc()
        sequence.end(failed)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.arrival in self._sequences.running:
            # The batch keeps the caches of its rows alive, and recurrent state.
            self._runner.disband()
            del self._sequences.running[sequence.arrival]
            self._resume.end(sequence)
        else:
            self._fetching.forget(sequence)
            self._entrance.let_go()
            self._sequences.waiting.remove(sequence)
