"""Runs what a step plan says: chunks of prompts, a decode step, or both in one pass.

Decode steps overlap where a device works by itself: while it is at one, the host reads the one before. Our own kernels
for a CPU are run by the host: there a token is read when its step ends, or it would wait for the step after it.
"""

from __future__ import annotations

import time

from kvstrata.engine.rates import Speeds
from kvstrata.engine.resume import Resume
from kvstrata.engine.runner import BatchRow, Guide, Launched, PromptChunk, Runner
from kvstrata.engine.scheduler import Chunk, StepPlan
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
        chunks = [self._chunk_of(chunk) for chunk in step_plan.prefill]
        if chunks and not step_plan.rides:
            self._prefill(chunks)
        riding = chunks if step_plan.rides else []
        rows = self._rows(step_plan.decode)
        if riding and not rows:
            self._prefill(riding)
            riding = []
        brings_first = any(not self._sequences.running[row.id].num_generated for row in rows)
        done = self._replace_in_flight(self._launch(rows, riding))
        self._after_chunks(riding)
        if not self.overlaps or chunks or brings_first or self._sequences.has_prompts:
            # Steps beside a prompt never overlap: how long each takes is what chunks are sized by. Nor does a step that
            # brings a first token: its client would wait until the next step is issued, too.
            done += self.take_in_flight()
        return done

    def take_in_flight(self) -> list[Launched]:
        """The step that is in flight, if there is one: it is to be read."""
        return self._replace_in_flight(None)

    def _replace_in_flight(self, launched: Launched | None) -> list[Launched]:
        done, self.in_flight = self.in_flight, launched
        return [done] if done is not None else []

    def _chunk_of(self, chunk: Chunk) -> PromptChunk:
        sequence = self._sequences.running[chunk.id]
        assert sequence.cache is not None
        start = sequence.cache.num_tokens
        return PromptChunk(chunk.id, sequence.cache, sequence.tokens[start : start + chunk.num_tokens])

    def _prefill(self, chunks: list[PromptChunk]) -> None:
        has_streams = self._sequences.has_streams
        began_s = time.perf_counter()
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if len(chunks) > 1 or (num_tokens == 1 and self._runner.mixes):
            # One token alone would attend as a stream does: on CUDA by kernels that MLX compiles then, for seconds.
            self._runner.prefill_together(chunks)
        else:
            self._runner.prefill(chunks[0].cache, chunks[0].tokens)
        self._speeds.count_chunk(num_tokens, time.perf_counter() - began_s, has_streams=has_streams)
        self._after_chunks(chunks)

    def _after_chunks(self, chunks: list[PromptChunk]) -> None:
        for chunk in chunks:
            sequence = self._sequences.running[chunk.id]
            with sequence.failing_alone():
                self._resume.after_chunk(sequence)
            self._metrics.prefill_tokens.inc(len(chunk.tokens))
            sequence.report_prefill()

    def _rows(self, keys: tuple[int, ...]) -> list[BatchRow]:
        """Of those that can decode: a grammar that fails ends its own request."""
        rows: list[BatchRow] = []
        for key in keys:
            sequence = self._sequences.running[key]
            with sequence.failing_alone():
                rows.append(self._row(sequence))
        return rows

    def _launch(self, rows: list[BatchRow], riding: list[PromptChunk]) -> Launched | None:
        if not rows:
            return None
        launched = self._runner.launch(rows, self.in_flight, riding)
        for row in rows:
            self._sequences.running[row.id].num_launched += 1
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
