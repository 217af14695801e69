"""Spans sealed, cut and joined at arbitrary points: their readers have the logits of an uninterrupted sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.kv.checkpoints import Checkpoint, needs_checkpoints, reaches, take_checkpoint
from kvstrata.kv.precision_plan import raw_plan
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import Span, SpanRange, prefix_of
from kvstrata.kv.transcode import shrink, transcode_layer
from tests.kv.drive import NUM_TOKENS, Text, sealed_span, text_for
from tests.support.models import ARCHITECTURES

ROUNDS = 3


@dataclass
class SpanHistory:
    """Cached KV of one text: consecutive spans from 0 on, and checkpoints."""

    text: Text
    data: st.DataObject
    spans: list[Span] = field(default_factory=list)
    owners: list[SequenceCache] = field(default_factory=list)  # still running
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.spans[-1].end if self.spans else 0

    def draw(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def draw_bool(self) -> bool:
        return self.data.draw(st.booleans())

    def resumed(self) -> SequenceCache:
        """Return a sequence that resumes somewhere in the cached tokens."""
        layout = self.text.layout
        places = [(at, 0) for at in range(1, self.end + 1)]  # position, and position of the checkpoint
        if needs_checkpoints(layout):
            checkpoints = self.checkpoints.values()
            places = [
                (at, checkpoint.position)
                for at, _ in places
                for checkpoint in checkpoints
                if reaches(checkpoint, layout, at)
            ]
        capacity = NUM_TOKENS + self.draw(0, 9)
        if not places:
            return SequenceCache(layout, self.text.model, capacity)
        at, position = self.data.draw(st.sampled_from(places))
        checkpoint = self.checkpoints.get(position)
        ranges = [SpanRange(span, span.position, min(span.end, at)) for span in self.spans if span.position < at]
        return SequenceCache(layout, self.text.model, capacity - at, prefix_of(layout, ranges, checkpoint))

    def run(self, cache: SequenceCache, end: int) -> None:
        """Advance in passes of random sizes, with a checkpoint after each."""
        while cache.num_tokens < end:
            self.text.advance(cache, min(end, cache.num_tokens + self.data.draw(st.sampled_from([1, 2, 17, 64]))))
            if needs_checkpoints(self.text.layout):
                self.checkpoints[cache.num_tokens] = take_checkpoint(cache)

    def seal(self, cache: SequenceCache) -> None:
        """Replace the cached tokens from the sequence's start on by its own. The sequence may continue."""
        at, end = cache.start, cache.num_tokens
        if self.draw_bool():
            # Encoded while it runs: with `raw`, so that it must change nothing.
            cache.encode_past(raw_plan(self.text.layout).pairs, RawWindow(self.draw(0, 4), self.draw(0, 20)))
        if end <= self.end:
            return
        self.spans = [span for span in self.spans if span.position < at]
        # No sequence may read tokens that are cut off.
        self.owners = [owner for owner in self.owners if owner.start <= at]
        if self.spans and self.spans[-1].end > at:
            self.spans[-1].cut(self.spans[-1].position, at)
            if self.draw_bool():
                for layer in self.spans[-1].layers:
                    shrink(self.spans[-1], layer)
        span = sealed_span(self.text.layout, cache)
        self.spans.append(span)
        if self.draw_bool():
            self.owners.append(cache)
        else:
            self.seal_raw(span)

    def seal_raw(self, span: Span) -> None:
        for layer in span.layers:
            transcode_layer(span, layer, raw_plan(self.text.layout).pairs[layer])

    def join(self) -> None:
        """Join two neighbours if their sequences have ended."""
        if len(self.spans) > 1:
            at = self.draw(0, len(self.spans) - 2)
            first, second = self.spans[at : at + 2]
            if not first.is_live and not second.is_live:
                first.append(second)
                del self.spans[at + 1]
                if self.draw_bool():
                    self.seal_raw(first)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=3)
@given(data=st.data())
def test_spans_sealed_cut_and_joined_anywhere_have_the_logits_of_mlx_lm(architecture: str, data: st.DataObject) -> None:
    history = SpanHistory(text_for(architecture), data)
    for _ in range(ROUNDS):
        cache = history.resumed()
        history.run(cache, history.draw(cache.num_tokens + 1, max(cache.num_tokens + 1, NUM_TOKENS - 10)))
        history.seal(cache)
        for owner in history.owners:
            # The owner continues to write the buffers that others read.
            history.run(owner, min(owner.num_tokens + 2, NUM_TOKENS))
        history.join()
        if history.draw_bool():
            history.owners.clear()
            for span in history.spans:
                history.seal_raw(span)
    history.run(history.resumed(), NUM_TOKENS)


def test_append_after_a_cut_reads_the_tokens_of_the_next_span() -> None:
    text = text_for("llama")
    first, other = (SequenceCache(text.layout, text.model, 60) for _ in range(2))
    text.advance(first, 60)
    # The same 20 tokens, then different ones.
    span = sealed_span(text.layout, first)
    text.advance(other, 20)
    text.model(mx.array([text.ids[60:100]]), cache=other.caches())
    other.end_pass(40)
    other_span = sealed_span(text.layout, other)
    plan = raw_plan(text.layout)
    for each in (span, other_span):
        for layer in each.layers:
            transcode_layer(each, layer, plan.pairs[layer])
    other_span.cut(0, 20)
    span.cut(20, 60)
    other_span.append(span)
    resumed = SequenceCache(text.layout, text.model, 40, prefix_of(text.layout, [SpanRange(other_span, 0, 60)], None))
    text.advance(resumed, 80)


def test_append_and_cut_refuse_ranges_that_do_not_fit() -> None:
    text = text_for("llama")
    cache = SequenceCache(text.layout, text.model, 30)
    text.advance(cache, 30)
    span = sealed_span(text.layout, cache)
    with pytest.raises(ValueError, match="cannot be joined"):
        span.append(span)
    for bad in ((0, 31), (-1, 10), (10, 10)):
        with pytest.raises(ValueError, match="cannot be cut"):
            span.cut(*bad)


def test_prefix_of_refuses_a_missing_checkpoint() -> None:
    text = text_for("gemma3_text")
    cache = SequenceCache(text.layout, text.model, 30)
    text.advance(cache, 30)
    span = sealed_span(text.layout, cache)
    with pytest.raises(ValueError, match="needs a checkpoint"):
        prefix_of(text.layout, [SpanRange(span, 0, 30)], None)
