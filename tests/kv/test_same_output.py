"""Sequences over spans that were sealed, cut and joined at arbitrary points say what an uninterrupted one says."""

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
from tests.tiny import ARCHITECTURES

ROUNDS = 3


@dataclass
class Walk:
    """What is stored of one text: spans that follow each other from 0 on, and marks."""

    text: Text
    data: st.DataObject
    spans: list[Span] = field(default_factory=list)
    owners: list[SequenceCache] = field(default_factory=list)  # that still run
    marks: dict[int, Checkpoint] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.spans[-1].end if self.spans else 0

    def draw(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def flip(self) -> bool:
        return self.data.draw(st.booleans())

    def resumed(self) -> SequenceCache:
        """A sequence that goes on somewhere in what is stored."""
        layout = self.text.layout
        places = [(at, 0) for at in range(1, self.end + 1)]  # where, and with which mark
        if needs_checkpoints(layout):
            marks = self.marks.values()
            places = [(at, mark.position) for at, _ in places for mark in marks if reaches(mark, layout, at)]
        capacity = NUM_TOKENS + self.draw(0, 9)
        if not places:
            return SequenceCache(layout, self.text.model, capacity)
        at, position = self.data.draw(st.sampled_from(places))
        mark = self.marks.get(position)
        ranges = [SpanRange(span, span.position, min(span.end, at)) for span in self.spans if span.position < at]
        return SequenceCache(layout, self.text.model, capacity - at, prefix_of(layout, ranges, mark))

    def run(self, cache: SequenceCache, end: int) -> None:
        """In passes of any sizes; marks where they end."""
        while cache.num_tokens < end:
            self.text.advance(cache, min(end, cache.num_tokens + self.data.draw(st.sampled_from([1, 2, 17, 64]))))
            if needs_checkpoints(self.text.layout):
                self.marks[cache.num_tokens] = take_checkpoint(cache)

    def seal(self, cache: SequenceCache) -> None:
        """What it computed takes the place of what was stored from there on; the sequence may go on."""
        at, end = cache.start, cache.num_tokens
        if self.flip():
            # Encoded while it runs: with `raw`, so that it must change nothing.
            cache.encode_past(raw_plan(self.text.layout).pairs, RawWindow(self.draw(0, 4), self.draw(0, 20)))
        if end <= self.end:
            return
        self.spans = [span for span in self.spans if span.position < at]
        # Nobody reads what is cut off.
        self.owners = [owner for owner in self.owners if owner.start <= at]
        if self.spans and self.spans[-1].end > at:
            self.spans[-1].cut(self.spans[-1].position, at)
            if self.flip():
                for layer in self.spans[-1].layers:
                    shrink(self.spans[-1], layer)
        span = sealed_span(self.text.layout, cache)
        self.spans.append(span)
        if self.flip():
            self.owners.append(cache)
        else:
            self.store(span)

    def store(self, span: Span) -> None:
        for layer in span.layers:
            transcode_layer(span, layer, raw_plan(self.text.layout).pairs[layer])

    def join(self) -> None:
        """Two neighbours, if their sequences have ended."""
        if len(self.spans) > 1:
            at = self.draw(0, len(self.spans) - 2)
            first, second = self.spans[at : at + 2]
            if not first.is_live and not second.is_live:
                first.append(second)
                del self.spans[at + 1]
                if self.flip():
                    self.store(first)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=3)
@given(data=st.data())
def test_parts_sealed_cut_and_joined_anywhere(architecture: str, data: st.DataObject) -> None:
    walk = Walk(text_for(architecture), data)
    for _ in range(ROUNDS):
        cache = walk.resumed()
        walk.run(cache, walk.draw(cache.num_tokens + 1, max(cache.num_tokens + 1, NUM_TOKENS - 10)))
        walk.seal(cache)
        for owner in walk.owners:
            # It goes on writing into the buffers that others read.
            walk.run(owner, min(owner.num_tokens + 2, NUM_TOKENS))
        walk.join()
        if walk.flip():
            walk.owners.clear()
            for span in walk.spans:
                walk.store(span)
    walk.run(walk.resumed(), NUM_TOKENS)


def test_a_join_after_a_cut_reads_the_neighbours_tokens_not_what_was_cut_off() -> None:
    text = text_for("llama")
    first, other = (SequenceCache(text.layout, text.model, 60) for _ in range(2))
    text.advance(first, 60)
    # The same 20 tokens, then different ones.
    span = sealed_span(text.layout, first)
    text.advance(other, 20)
    text.model(mx.array([text.ids[60:100]]), cache=other.caches())
    other.end_pass(40)
    theirs = sealed_span(text.layout, other)
    plan = raw_plan(text.layout)
    for each in (span, theirs):
        for layer in each.layers:
            transcode_layer(each, layer, plan.pairs[layer])
    theirs.cut(0, 20)
    span.cut(20, 60)
    theirs.append(span)
    resumed = SequenceCache(text.layout, text.model, 40, prefix_of(text.layout, [SpanRange(theirs, 0, 60)], None))
    text.advance(resumed, 80)


def test_what_does_not_follow_is_not_joined() -> None:
    text = text_for("llama")
    cache = SequenceCache(text.layout, text.model, 30)
    text.advance(cache, 30)
    span = sealed_span(text.layout, cache)
    with pytest.raises(ValueError, match="cannot be joined"):
        span.append(span)
    for bad in ((0, 31), (-1, 10), (10, 10)):
        with pytest.raises(ValueError, match="cannot be cut"):
            span.cut(*bad)


def test_prefix_of_without_a_needed_checkpoint_is_refused() -> None:
    text = text_for("gemma3_text")
    cache = SequenceCache(text.layout, text.model, 30)
    text.advance(cache, 30)
    span = sealed_span(text.layout, cache)
    with pytest.raises(ValueError, match="needs a checkpoint"):
        prefix_of(text.layout, [SpanRange(span, 0, 30)], None)
