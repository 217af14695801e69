"""Runs what a step plan says: a chunk of a prompt, a decode step, or both in one pass.

Decode steps overlap where a device works by itself: while it is at one, the host reads the one before. Our own kernels
for a CPU are run by the host: there a token is read when its step ends, or it would wait for the step after it.
"""

from __future__ import annotations

import time

from kvstrata.engine.rates import Speeds
from kvstrata.engine.resume import Resume
from kvstrata.engine.runner import BatchRow, Guide, Launched, PromptChunk, Runner
from kvstrata.engine.scheduler import StepPlan
from kvstrata.engine.sequence import Sequence
from kvstrata.engine.sequences import Sequences
from kvstrata.metrics import Metrics


class Passes:
    def __init__(
        self,
        runner: Runner,
        sequences: Sequences,
        resume: Resume,
        speeds: Speeds,
        metrics: Metrics,
        *,
        vocab_size: int,
        overlaps: bool,
    ) -> None:
        self._runner = runner
        self._sequences = sequences
        self._resume = resume
        self._speeds = speeds
        self._metrics = metrics
        self._vocab_size = vocab_size
        self.overlaps = overlaps
        self.in_flight: Launched | None = None

    def run(self, step_plan: StepPlan) -> list[Launched]:
        """Tells which steps are over, so that their tokens can be read."""
        chunk = self._chunk_of(step_plan)
        if chunk is not None and not step_plan.rides:
            self._prefill(chunk)
        riding = chunk if step_plan.rides else None
        done = self._replace_in_flight(self._launch(step_plan.decode, riding))
        if riding is not None:
            self._after_chunk(riding)
        if not self.overlaps or chunk is not None or self._sequences.has_prompts:
            # Steps beside a prompt never overlap: how long each takes is what chunks are sized by.
            done += self.take_in_flight()
        return done

    def take_in_flight(self) -> list[Launched]:
        """The step that is in flight, if there is one: it is to be read."""
        return self._replace_in_flight(None)

    def _replace_in_flight(self, launched: Launched | None) -> list[Launched]:
        done, self.in_flight = self.in_flight, launched
        return [done] if done is not None else []

    def _chunk_of(self, step_plan: StepPlan) -> PromptChunk | None:
        if step_plan.prefill is None:
            return None
        sequence = self._sequences.running[step_plan.prefill.id]
        assert sequence.cache is not None
        start = sequence.cache.num_tokens
        tokens = sequence.tokens[start : start + step_plan.prefill.num_tokens]
        return PromptChunk(sequence.arrival, sequence.cache, tokens)

    def _prefill(self, chunk: PromptChunk) -> None:
        has_streams = self._sequences.has_streams
        began_s = time.perf_counter()
        self._runner.prefill(chunk.cache, chunk.tokens)
        self._speeds.count_chunk(len(chunk.tokens), time.perf_counter() - began_s, has_streams=has_streams)
        self._after_chunk(chunk)

    def _after_chunk(self, chunk: PromptChunk) -> None:
        sequence = self._sequences.running[chunk.id]
        self._resume.after_chunk(sequence)
        self._metrics.prefill_tokens.inc(len(chunk.tokens))
        sequence.report_prefill()

    def _launch(self, keys: tuple[int, ...], riding: PromptChunk | None) -> Launched | None:
        if not keys:
            return None
        sequences = [self._sequences.running[key] for key in keys]
        launched = self._runner.launch([self._row(sequence) for sequence in sequences], self.in_flight, riding)
        for sequence in sequences:
            sequence.num_launched += 1
        return launched

    def _row(self, sequence: Sequence) -> BatchRow:
        assert sequence.cache is not None
        if sequence.prefill_left:
            # Rather none than wrong ones: its last token would take the place of one that is not computed yet.
            raise RuntimeError(f"{sequence.prefill_left} tokens of a prompt are not computed: it cannot decode yet")
        known = sequence.num_launched == sequence.num_generated
        token = sequence.tokens[-1] if known else None
        sampler, matcher = sequence.sampler(self._vocab_size), sequence.matcher()
        guide = None if matcher is None else Guide(matcher, sequence.num_generated)
        return BatchRow(sequence.arrival, sequence.cache, sampler, token, guide)
