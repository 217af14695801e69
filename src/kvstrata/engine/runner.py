"""Forward passes: prompt chunks, one token per row, or both.

The runner knows the model and the caches of sequences; it does not know requests. Decoding is pipelined: `launch`
reads the tokens of the pending step on the device, computed or not, so that the device runs one step while the host
reads the step before. A row with a grammar needs its pending token on the host before its next token can be drawn:
`launch` starts the pass first, then reads the pending step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.engine.sampling import SampledTokens, Sampler, sample
from kvstrata.grammar.matcher import AllowedTokens, Matcher, TokenMasks, shortened
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.decode_step import CompiledStep
from kvstrata.kv.layout import Layout, arrays_in
from kvstrata.kv.mixed_pass import MixedPass, PromptCaches
from kvstrata.kv.sequence_cache import Prefix, SequenceCache

log = logging.getLogger(__name__)

# Rows of the largest step that is traced at the start.
MAX_TRACED_ROWS = 32


@dataclass(frozen=True)
class BatchRow:
    """A sequence in a pass. A row without a sampler is a prompt chunk; a row with a sampler decodes one token."""

    id: int
    cache: SequenceCache
    tokens: Sequence[int]  # its inputs; empty: the token that the pending step samples
    sampler: Sampler | None = None  # None: a prompt chunk, nothing is sampled
    matcher: Matcher | None = None  # None: every token is allowed
    num_known: int = 0  # reply tokens before the pending one, all of which the matcher has consumed


@dataclass(frozen=True)
class PendingStep:
    """A launched step that the host has not read. `ids`: sequences of its rows that decode."""

    ids: tuple[int, ...]
    sampled: SampledTokens
    began_s: float
    num_prompt_tokens: int = 0  # of chunks in the same pass
    failures: dict[int, str] = field(default_factory=dict)  # reasons why tokens are invalid, by id of the sequence


class ModelRunner:
    """Runs forward passes of one model. Owns the batch: the caches of all rows, joined for steps."""

    def __init__(self, model: Any, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._batch: BatchCache | None = None
        self._compiled = CompiledStep(model) if layout.compiles else None
        self._masks = TokenMasks()

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def model(self) -> Any:
        return self._model

    @property
    def num_weights(self) -> int:
        return sum(array.size for array in arrays_in(self._model.parameters()))

    def new_cache(self, capacity: int, prefix: Prefix | None = None, raw_tokens: int | None = None) -> SequenceCache:
        return SequenceCache(self._layout, self._model, capacity, prefix, raw_tokens)

    def prefill_chunks(self, chunks: Sequence[BatchRow]) -> None:
        """Compute KV for prompt chunks. Several share a pass, which needs a runner that `mixes`."""
        if len(chunks) > 1 or (self.mixes and len(chunks[0].tokens) == 1):
            # One token alone would attend as a stream does: on CUDA by kernels that MLX compiles then, for seconds.
            self._prefill_together(chunks)
        else:
            self.prefill(chunks[0].cache, chunks[0].tokens)

    def prefill(self, cache: SequenceCache, tokens: Sequence[int]) -> None:
        """Compute KV for `tokens`. MLX is lazy and no code reads the logits, so the output layer never runs."""
        self._model(mx.array([tokens]), cache=PromptCaches(cache.caches()))
        cache.end_pass(len(tokens))
        mx.eval(cache.arrays())

    def _prefill_together(self, chunks: Sequence[BatchRow]) -> None:
        mixed = MixedPass([(chunk.cache, len(chunk.tokens)) for chunk in chunks], None)
        self._model(mx.array([token for chunk in chunks for token in chunk.tokens])[:, None], cache=mixed.begin())
        mixed.end()
        mx.eval([chunk.cache.arrays() for chunk in chunks])

    @property
    def mixes(self) -> bool:
        """Whether one pass may have several chunks, and chunks beside rows that decode."""
        return self._layout.mixes

    def launch(self, rows: Sequence[BatchRow], pending: PendingStep | None) -> PendingStep:
        """Start a step: one token for every row that decodes. Prompt chunks come first; they share the pass, which
        needs a runner that `mixes`."""
        began_s = time.perf_counter()
        samplers = [row.sampler for row in rows if row.sampler is not None]
        num_chunks = len(rows) - len(samplers)
        chunks, rows = rows[:num_chunks], rows[num_chunks:]
        tokens = step_inputs(rows, pending)
        logits = self._forward_mixed(rows, tokens, chunks) if chunks else self._forward(rows, tokens)
        written = [chunk.cache.arrays() for chunk in chunks]
        allowed = AllowedTokens()
        if any(row.matcher is not None for row in rows):
            mx.async_eval(logits, self._state_arrays(rows), written)
            allowed = self._allowed_tokens(rows, pending, vocab_size=logits.shape[-1])
        sampled = sample(logits, samplers, allowed.tokens)
        changed = [array for sampler in samplers for array in sampler.arrays()]
        mx.async_eval(sampled.arrays(), changed, self._state_arrays(rows), written)
        num_prompt_tokens = sum(len(chunk.tokens) for chunk in chunks)
        failures = {rows[index].id: reason for index, reason in allowed.failures.items()}
        return PendingStep(tuple(row.id for row in rows), sampled, began_s, num_prompt_tokens, failures)

    def _allowed_tokens(self, rows: Sequence[BatchRow], pending: PendingStep | None, vocab_size: int) -> AllowedTokens:
        """Return the tokens that the grammars allow next. Waits for the pending step where a grammar needs it."""
        needs_pending = any(row.matcher is not None and not row.tokens for row in rows)
        tokens = dict(zip(pending.ids, pending.sampled.read(), strict=True)) if pending and needs_pending else {}
        matchers: list[Matcher | None] = [None] * len(rows)
        failures: dict[int, str] = {}
        for index, row in enumerate(rows):
            if row.matcher is None:
                continue
            try:
                if not row.tokens:
                    row.matcher.consume(row.num_known, tokens[row.id])
                matchers[index] = row.matcher
            except Exception as error:
                log.exception("A grammar failed")
                failures[index] = shortened(repr(error))
        allowed = self._fill_masks(matchers, vocab_size)
        return AllowedTokens(allowed.tokens, {**failures, **allowed.failures})

    def _fill_masks(self, matchers: Sequence[Matcher | None], vocab_size: int) -> AllowedTokens:
        """Fill the masks of all rows in one call. Where it raises, fill row by row, and fail the rows that raise."""
        try:
            return self._masks.fill(matchers, vocab_size)
        except Exception:
            log.exception("Masks of a batch could not be made together")
        tokens, failures = np.ones((len(matchers), vocab_size), np.bool_), dict[int, str]()
        for index, matcher in enumerate(matchers):
            try:
                single = self._masks.fill([matcher], vocab_size)
            except Exception as error:
                log.exception("A grammar failed")
                failures[index] = shortened(repr(error))
            else:
                if single.failures:
                    failures[index] = single.failures[0]
                if single.tokens is not None:
                    tokens[index] = single.tokens[0]
        return AllowedTokens(tokens, failures)

    @property
    def plans_steps(self) -> bool:
        """Whether the reads of a step are planned before it, and again after KV was transcoded."""
        return self._compiled is not None

    @property
    def planning_s(self) -> float:
        """Seconds that the plan of the last step took; 0: it was reused or there is none."""
        return self._batch.planning_s if self._batch else 0.0

    def trace_steps(self, max_rows: int) -> None:
        """Run a compiled step of each number of rows, because tracing the first step takes as long as several steps."""
        if self._compiled is None:
            return
        for num_rows in range(1, min(max_rows, MAX_TRACED_ROWS) + 1):
            # All rows share one cache, because no code reads the tokens that they write.
            batch = BatchCache([self.new_cache(num_rows)] * num_rows)
            self._compiled.run(mx.zeros((num_rows,), mx.int32), batch)
            batch.end_plan()

    def disband(self) -> None:
        """Dissolve the batch: give every sequence its own recurrent state back."""
        if self._batch is not None:
            self._batch.release()
            self._batch = None

    def abandon(self) -> None:
        """Drop the batch without giving states back: its sequences have ended, and its arrays may be invalid."""
        # Wait for kernels that read through addresses, because MLX does not keep their arrays alive.
        with suppress(RuntimeError):
            mx.synchronize()
        self._batch = None

    def _forward(self, rows: Sequence[BatchRow], tokens: mx.array) -> mx.array:  # tokens: [rows] -> [rows, vocab]
        compiled = self._compiled.run(tokens, self._batch_of(rows)) if self._compiled else None
        if compiled is not None:
            return compiled
        if len(rows) == 1 or self._layout.batching == "per_sequence":
            self.disband()
            return mx.concatenate([self._forward_alone(row, tokens[i : i + 1]) for i, row in enumerate(rows)])
        batch = self._batch_of(rows)
        logits = self._model(tokens[:, None], cache=batch.begin_step())
        batch.end_step()
        return logits[:, -1]

    def _forward_mixed(
        self, rows: Sequence[BatchRow], tokens: mx.array, chunks: Sequence[BatchRow]
    ) -> mx.array:  # -> [rows, vocab]
        sizes = [(chunk.cache, len(chunk.tokens)) for chunk in chunks]
        mixed = MixedPass(sizes, self._batch_of(rows), is_planned=self._layout.compiles)
        prompts = mx.array([token for chunk in chunks for token in chunk.tokens], mx.int32)
        inputs = mx.concatenate([prompts, tokens])
        logits = self._model(inputs[:, None], cache=mixed.begin())
        mixed.end()
        return logits[-len(rows) :, -1]

    def _batch_of(self, rows: Sequence[BatchRow]) -> BatchCache:
        caches = tuple(row.cache for row in rows)
        if self._batch is None or self._batch.sequences != caches:
            self.disband()
            self._batch = BatchCache(caches)
        return self._batch

    def _forward_alone(self, row: BatchRow, token: mx.array) -> mx.array:
        logits = self._model(token[None], cache=row.cache.caches())
        row.cache.end_pass(1)
        return logits[:, -1]

    def _state_arrays(self, rows: Sequence[BatchRow]) -> list[mx.array]:
        return self._batch.states() if self._batch else [array for row in rows for array in row.cache.states()]


def step_inputs(rows: Sequence[BatchRow], pending: PendingStep | None) -> mx.array:  # [rows]
    """Return the next input of each row: a known token, or the token that the pending step samples."""
    if pending is not None and tuple(row.id for row in rows) == pending.ids and not any(row.tokens for row in rows):
        return pending.sampled.tokens
    index_of = {id_: index for index, id_ in enumerate(pending.ids)} if pending else {}
    tokens = []
    for row in rows:
        if row.tokens:
            tokens.append(mx.array(list(row.tokens), mx.int32))
        else:
            assert pending is not None
            # A slice instead of an index: for an index MLX gathers, on CUDA with a kernel that it first compiles.
            tokens.append(pending.sampled.tokens[index_of[row.id] : index_of[row.id] + 1])
    return mx.concatenate(tokens)
