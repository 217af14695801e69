"""Forward passes: chunks of prompts, one token for every row of the batch, or both in one.

Knows the model and the sequences' caches; does not know requests. Decoding is pipelined: `launch` takes the tokens of
the step before as they are, computed or not, so the device always has a step to work on while the host reads the last.
Rows that follow a grammar need those tokens before theirs can be drawn: the pass is started first, then they are read.
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

from kvstrata.engine.sampling import Sampled, Sampler, sample
from kvstrata.grammar.masks import Allowed, Masks
from kvstrata.grammar.matcher import Matcher, shortened
from kvstrata.layers.batch import BatchCache
from kvstrata.layers.compiled import CompiledStep
from kvstrata.layers.kept import PromptCaches
from kvstrata.layers.kinds import Layout, arrays_in
from kvstrata.layers.mixed import MixedPass
from kvstrata.layers.sequence import Prefix, SequenceCache

log = logging.getLogger(__name__)

# Rows of the largest step that is traced before a request comes.
MAX_TRACED_ROWS = 32


@dataclass(frozen=True)
class GrammarState:
    """The grammar of a row. `num_known`: tokens of the reply without the one in flight; the matcher has them all."""

    matcher: Matcher
    num_known: int


@dataclass(frozen=True)
class BatchRow:
    """One sequence in a step. `token` is its next input; None: what the step in flight gives it."""

    id: int
    cache: SequenceCache
    sampler: Sampler
    token: int | None
    grammar: GrammarState | None = None  # None: any token may come


@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of a sequence's prompt."""

    id: int
    cache: SequenceCache
    tokens: list[int]


@dataclass(frozen=True)
class PendingStep:
    """A step in flight: `ids` are its rows."""

    ids: tuple[int, ...]
    sampled: Sampled
    began_s: float
    num_prompt_tokens: int = 0  # prompt tokens
    failures: dict[int, str] = field(default_factory=dict)  # by id: why a row's token is not to be used


class ModelRunner:
    def __init__(self, model: Any, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._batch: BatchCache | None = None
        self._compiled = CompiledStep(model) if layout.compiles else None
        self._masks = Masks()

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

    def prefill(self, cache: SequenceCache, tokens: Sequence[int]) -> None:
        """Compute KV for `tokens`. No logits: no code reads them, so the output layer never runs."""
        self._model(mx.array([tokens]), cache=PromptCaches(cache.caches()))
        cache.end_pass(len(tokens))
        mx.eval(cache.arrays())

    def prefill_together(self, chunks: Sequence[PromptChunk]) -> None:
        """As `prefill`, of several sequences in one pass: only if it `mixes`."""
        mixed = MixedPass([(chunk.cache, len(chunk.tokens)) for chunk in chunks], None)
        self._model(mx.array([token for chunk in chunks for token in chunk.tokens])[:, None], cache=mixed.begin())
        mixed.end()
        mx.eval([chunk.cache.arrays() for chunk in chunks])

    @property
    def mixes(self) -> bool:
        """Whether chunks may ride along with a decode step, and several with each other."""
        return self._layout.mixes

    def launch(
        self, rows: Sequence[BatchRow], before: PendingStep | None, riding: Sequence[PromptChunk] = ()
    ) -> PendingStep:
        """Start one token for every row. `riding` goes through the same pass: only if it `mixes`."""
        began_s = time.perf_counter()
        tokens = _inputs(rows, before)
        logits = self._forward_mixed(rows, tokens, riding) if riding else self._forward(rows, tokens)
        written = [chunk.cache.arrays() for chunk in riding]
        allowed = Allowed()
        if any(row.grammar is not None for row in rows):
            mx.async_eval(logits, self._state_arrays(rows), written)
            allowed = self._allowed(rows, before, vocab_size=logits.shape[-1])
        sampled = sample(logits, [row.sampler for row in rows], allowed.tokens)
        changed = [array for row in rows for array in row.sampler.arrays()]
        mx.async_eval(sampled.arrays(), changed, self._state_arrays(rows), written)
        num_riding = sum(len(chunk.tokens) for chunk in riding)
        failures = {rows[place].id: why for place, why in allowed.failures.items()}
        return PendingStep(tuple(row.id for row in rows), sampled, began_s, num_riding, failures)

    def _allowed(self, rows: Sequence[BatchRow], before: PendingStep | None, vocab_size: int) -> Allowed:
        """What may follow the tokens of the step before, which it waits for."""
        ahead = any(row.grammar is not None and row.token is None for row in rows)
        tokens = dict(zip(before.ids, before.sampled.read(), strict=True)) if before and ahead else {}
        matchers: list[Matcher | None] = [None] * len(rows)
        failures: dict[int, str] = {}
        for place, row in enumerate(rows):
            if row.grammar is None:
                continue
            try:
                if row.token is None:
                    row.grammar.matcher.consume(row.grammar.num_known, tokens[row.id])
                matchers[place] = row.grammar.matcher
            except Exception as error:
                log.exception("A grammar failed")
                failures[place] = shortened(repr(error))
        allowed = self._fill(matchers, vocab_size)
        return Allowed(allowed.tokens, {**failures, **allowed.failures})

    def _fill(self, matchers: Sequence[Matcher | None], vocab_size: int) -> Allowed:
        """Masks of all rows in one call; where that raises, row by row: only the one that raises again fails."""
        try:
            return self._masks.fill(matchers, vocab_size)
        except Exception:
            log.exception("Masks of a batch could not be made together")
        tokens, failures = np.ones((len(matchers), vocab_size), np.bool_), dict[int, str]()
        for place, matcher in enumerate(matchers):
            try:
                alone = self._masks.fill([matcher], vocab_size)
            except Exception as error:
                log.exception("A grammar failed")
                failures[place] = shortened(repr(error))
            else:
                if alone.failures:
                    failures[place] = alone.failures[0]
                if alone.tokens is not None:
                    tokens[place] = alone.tokens[0]
        return Allowed(tokens, failures)

    @property
    def plans_steps(self) -> bool:
        """Whether what a step reads is found before it, and again when it is stored in another way."""
        return self._compiled is not None

    @property
    def planning_s(self) -> float:
        """How long that took for the last step."""
        return self._batch.planning_s if self._batch else 0.0

    def trace_steps(self, most_rows: int) -> None:
        """Run a compiled step of each number of rows: the first of each is traced, which takes as long as several."""
        if self._compiled is None:
            return
        for num_rows in range(1, min(most_rows, MAX_TRACED_ROWS) + 1):
            # Rows may share a sequence here: no code reads what they write.
            batch = BatchCache([self.new_cache(num_rows)] * num_rows)
            self._compiled.run(mx.zeros((num_rows,), mx.int32), batch)
            batch.end_plan()

    def disband(self) -> None:
        """Give every sequence of the batch its own state back."""
        if self._batch is not None:
            self._batch.release()
            self._batch = None

    def abandon(self) -> None:
        """Forget the batch as it is: its sequences are at an end, and what it holds may not be computable."""
        # What is in flight may read through addresses, of which MLX knows nothing.
        with suppress(RuntimeError):
            mx.synchronize()
        self._batch = None

    def _forward(self, rows: Sequence[BatchRow], tokens: mx.array) -> mx.array:  # tokens: [rows] -> [rows, vocab]
        compiled = self._compiled.run(tokens, self._batch_of(rows)) if self._compiled else None
        if compiled is not None:
            return compiled
        if len(rows) == 1 or self._layout.path == "rows":
            self.disband()
            return mx.concatenate([self._forward_alone(row, tokens[i : i + 1]) for i, row in enumerate(rows)])
        batch = self._batch_of(rows)
        logits = self._model(tokens[:, None], cache=batch.begin_step())
        batch.end_step()
        return logits[:, -1]

    def _forward_mixed(
        self, rows: Sequence[BatchRow], tokens: mx.array, riding: Sequence[PromptChunk]
    ) -> mx.array:  # -> [rows, vocab]
        chunks = [(chunk.cache, len(chunk.tokens)) for chunk in riding]
        mixed = MixedPass(chunks, self._batch_of(rows), is_planned=self._layout.compiles)
        prompts = mx.array([token for chunk in riding for token in chunk.tokens], mx.int32)
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


def _inputs(rows: Sequence[BatchRow], before: PendingStep | None) -> mx.array:
    if before is not None and tuple(row.id for row in rows) == before.ids and all(row.token is None for row in rows):
        return before.sampled.tokens
    places = {id_: place for place, id_ in enumerate(before.ids)} if before else {}
    tokens = []
    for row in rows:
        if row.token is not None:
            tokens.append(mx.array([row.token], mx.int32))
        else:
            assert before is not None
            # A slice: MLX gathers by a number, on CUDA with a kernel that it first has to compile.
            tokens.append(before.sampled.tokens[places[row.id] : places[row.id] + 1])
    return mx.concatenate(tokens)
