"""Reads the tokens of steps that are over, and hands each to its sequence."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.engine.endings import Endings
from kvstrata.engine.rates import Speeds
from kvstrata.engine.request import Failed, Request
from kvstrata.engine.resume import Resume
from kvstrata.engine.runner import Launched
from kvstrata.engine.sequence import Sequence
from kvstrata.engine.sequences import Sequences
from kvstrata.metrics import Metrics
from kvstrata.text.detokenizer import Detokenizer


class Replies:
    def __init__(
        self,
        sequences: Sequences,
        resume: Resume,
        endings: Endings,
        speeds: Speeds,
        metrics: Metrics,
        detokenizer: Callable[[Request], Detokenizer],
    ) -> None:
        self._sequences = sequences
        self._resume = resume
        self._endings = endings
        self._speeds = speeds
        self._metrics = metrics
        self._detokenizer = detokenizer

    def read(self, done: list[Launched], *, is_overlapped: bool) -> None:
        """`is_overlapped`: another step was launched before these are read."""
        running = self._sequences.running
        for step in done:
            tokens = step.sampled.read()
            # Rows of sequences that have ended since were computed for nothing.
            kept = [(row, key) for row, key in enumerate(step.ids) if key in running]
            is_last = step is done[-1] and not is_overlapped
            self._speeds.count_step(step, len(kept), is_last=is_last, has_prompts=self._sequences.has_prompts)
            for row, key in kept:
                if key in step.failures:
                    self._endings.fail(running[key], Failed(_cannot_follow(step.failures[key]), "grammar"))
                else:
                    with running[key].failing_alone():
                        self._accept(running[key], tokens[row], step, row)
        self._endings.fail_those_that_cannot_go_on()

    def _accept(self, sequence: Sequence, token: int, step: Launched, row: int) -> None:
        logprobs = step.sampled.logprobs.get(row)
        before_s = sequence.last_token_s
        sequence.accept(token, logprobs.read(token) if logprobs else None, self._detokenizer)
        self._metrics.generation_tokens.inc()
        self._resume.after_step(sequence)
        if sequence.last_token_s is not None and before_s is not None:
            self._metrics.inter_token_s.observe(sequence.last_token_s - before_s)
        elif sequence.last_token_s is not None:
            self._metrics.first_token_s.observe(sequence.last_token_s - sequence.submitted_s)
        if sequence.finish_reason is not None:
            self._endings.finish(sequence, sequence.finish_reason)


def _cannot_follow(reason: str) -> str:
    return f"The schema or grammar of this request could not be followed further: {reason}. Make it simpler."
