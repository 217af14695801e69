"""Transcode layers of a span in small steps: trim, encode, step down and join."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from kvstrata.attention.segments import SealedPart
from kvstrata.codecs.raw import RawCodec
from kvstrata.kv.checkpoints import Mark
from kvstrata.kv.convert import RAW, lowered, next_piece, owned, stays
from kvstrata.kv.own_kv import OwnTokens
from kvstrata.kv.precision_plan import Plan
from kvstrata.kv.sequence_cache import Pair
from kvstrata.kv.span import Span
from kvstrata.kv.work_sizes import grain_of


class LayerRewrite:
    """The transcoding of one layer to a pair of codecs, in memory of its own, trimmed to the span's tokens.

    Readers see the old form or the new one, and between two steps the layer is whole. The caller passes the span to
    each step, and no reference is kept: the memory of a span that is evicted meanwhile is freed at once.
    """

    def __init__(self, layer: int, pair: Pair) -> None:
        self._layer = layer
        self._pair = pair
        self._version = -1  # of the span after the last step
        self._start = 0  # tokens before this position are done and in the span
        self._at = 0  # tokens before this position are done
        self._made: list[SealedPart] = []  # tokens [start, at)

    def advance(self, span: Span, *, upward: bool = False) -> bool:
        """Do the next small step, a `next_piece`. Return whether there is more to do. The work starts over where other
        code has changed the span since the last step."""
        if span.num_tokens < 1:
            raise ValueError(f"a span of {span.num_tokens} tokens cannot be stored: seal some first")
        if self._version != span.version:
            self._version, self._start, self._at, self._made = span.version, span.position, span.position, []
        if self._pair == RAW and self._at == span.position and _adopt_buffer(span, self._layer):
            return False
        spec = span.layout.flat()[self._layer]
        grain = grain_of(spec)
        is_same = True
        while is_same and self._at < span.end:
            parts = span.parts(self._layer, self._at, span.end)
            piece = next_piece(parts, self._at, self._pair, spec.dtype, grain, upward=upward)
            is_same = piece is parts[0]
            self._made.append(piece)
            self._at += piece.num_tokens
            if self._at % grain.part_tokens == 0 or self._at == span.end:
                self._made = grain.join(self._made)
                self._put(span)
        return self._at < span.end

    def _put(self, span: Span) -> None:
        """Put new segments in place if they replace whole ones. A buffer goes when all of its tokens are replaced."""
        held = span.held(self._layer)
        after: tuple[SealedPart, ...] = ()
        if self._at < span.end:
            if isinstance(held, OwnTokens) or any(part.k.position < self._at < part.k.end for part in held):
                return
            after = tuple(part for part in held if part.k.position >= self._at)
        done = () if isinstance(held, OwnTokens) else held
        before = (part for part in done if span.position < part.k.end <= self._start)
        span.replace(self._layer, (*before, *self._made, *after))
        self._version, self._start, self._made = span.version, self._at, []


def rewrite_layer(span: Span, layer: int, pair: Pair, *, upward: bool = False) -> None:
    """Transcode a layer, all steps at once."""
    rewriting = LayerRewrite(layer, pair)
    while rewriting.advance(span, upward=upward):
        pass


def is_under(span: Span, layer: int, pair: Pair, *, upward: bool = False) -> bool:
    """Whether transcoding would leave the layer as it is."""
    held, spec = span.held(layer), span.layout.flat()[layer]
    if isinstance(held, OwnTokens) or sum(part.num_tokens for part in held) != span.num_tokens:
        return False
    grain = grain_of(spec)
    if any(grain.may_join(a, b) for a, b in pairwise(held)):
        return False
    return all(stays(part, pair, spec.dtype, upward=upward) for part in held)


def shrink(span: Span, layer: int) -> None:
    """Free what a cut left over, and the buffers of a live layer, which no sequence may write any more."""
    if isinstance(span.held(layer), OwnTokens):
        rewrite_layer(span, layer, RAW)
    else:
        span.replace(layer, [owned(part) for part in span.parts(layer, span.position, span.end)])


def rewriting_marks(span: Span, plan: Plan) -> Iterator[None]:
    """Transcode the checkpoints, a ring in each step. Steps are short: no ring is longer than its window."""
    for at in list(span.marks):
        for i, (pair, spec) in enumerate(zip(plan.pairs, span.layout.flat(), strict=True)):
            mark = span.marks.get(at)  # None: dropped meanwhile
            ring = mark.states[i] if mark is not None else None
            if mark is not None and isinstance(ring, SealedPart) and not stays(ring, pair, spec.dtype):
                states = (*mark.states[:i], lowered(ring, pair, spec.dtype), *mark.states[i + 1 :])
                span.marks[at] = replace(mark, states=states)
                yield


def marks_are_under(span: Span, plan: Plan) -> bool:
    """Whether transcoding would leave all checkpoints as they are. A model may have no other KV."""
    return all(_is_mark_under(span, mark, plan) for mark in span.marks.values())


def _is_mark_under(span: Span, mark: Mark, plan: Plan) -> bool:
    states = zip(mark.states, plan.pairs, span.layout.flat(), strict=True)
    return all(stays(state, pair, spec.dtype) for state, pair, spec in states if isinstance(state, SealedPart))


def _adopt_buffer(span: Span, layer: int) -> bool:
    """Keep a buffer as it is if the span fills it exactly. Return whether it was kept."""
    held = span.held(layer)
    if not isinstance(held, OwnTokens) or (held.start, held.end) != (span.position, span.end):
        return False
    whole = held.whole_arrays()
    if whole is not None:
        span.replace(layer, (SealedPart(*(RawCodec().adopt(array, span.position) for array in whole)),))
    return whole is not None
