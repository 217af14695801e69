"""How sequences end: their memory goes back, what they computed stays in the store, and their client is told."""

from __future__ import annotations

import time

from kvstrata.engine.entrance import Entrance
from kvstrata.engine.fetching import Fetching
from kvstrata.engine.first_in_line import Unservable
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
        try:
            self._remove(sequence)
        finally:
            self._metrics.requests.labels(outcome=reason).inc()
            self._metrics.request_s.observe(time.monotonic() - sequence.submitted_s)
            sequence.end(Finished(reason, sequence.usage, sequence.stop_found, sequence.reply_ids))

    def fail(self, sequence: Sequence, failed: Failed) -> None:
        try:
            self._remove(sequence)
        finally:
            self._tell_failure(sequence, failed)

    def end_unservable(self, unservable: Unservable) -> None:
        """End a request that memory has no room for."""
        sequence = unservable.sequence
        if unservable.failure is not None:
            self.fail(sequence, unservable.failure)
        else:
            sequence.cut_short()
            self.finish(sequence, "length")

    def fail_those_that_cannot_go_on(self) -> None:
        """Work for each of them failed; it costs no other request anything."""
        for sequence in self._sequences.all:
            if sequence.failure is not None:
                self.fail(sequence, sequence.failure)

    def end(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """Before the model ends it."""
        for sequence in self._sequences.all:
            if sequence.request.id == request_id:
                self.finish(sequence, reason)

    def end_all(self, message: str) -> None:
        """End each sequence as if it had ended by itself: what it has computed stays in the cache."""
        for sequence in self._sequences.all:
            with sequence.failing_alone():
                self.fail(sequence, Failed(message))

    def fail_all(self, message: str) -> None:
        """End everything that runs or waits, and start from nothing."""
        sequences = self._sequences.all
        self._sequences.waiting = []
        self._sequences.running.clear()
        try:
            self._runner.abandon()
        finally:
            for sequence in sequences:
                self._tell_failure(sequence, Failed(message))
        for sequence in sequences:
            self._fetching.forget(sequence)

    def _tell_failure(self, sequence: Sequence, failed: Failed) -> None:
        self._metrics.requests.labels(outcome="failed").inc()
        sequence.end(failed)

    def _remove(self, sequence: Sequence) -> None:
        """First from the tables, so that no fault leaves one behind that has ended."""
        if self._sequences.running.pop(sequence.arrival, None) is not None:
            # The batch keeps the caches of its rows alive, and recurrent state.
            self._runner.disband()
            self._resume.end(sequence)
            self._resume.pin(sequence)
        else:
            self._sequences.waiting.remove(sequence)
            self._fetching.forget(sequence)
            self._entrance.let_go()
