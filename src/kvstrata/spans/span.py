"""The span: consecutive tokens of one sequence, over all layers.

While the sequence that computes it runs, a span is *live*: its layers are that sequence's own, and others read them
through it, so sealing copies nothing. After that it owns its memory: one or more parts in each layer, under any codecs.
What a layer holds may be replaced between two steps; readers ask anew at each step and see the replacement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import mlx.core as mx

from kvstrata.attention.parts import Part, SealedPart, cut_parts
from kvstrata.codecs.base import Codec, Planes
from kvstrata.layers.grain import Grain, grain_of
from kvstrata.layers.kinds import Layout
from kvstrata.layers.own import OwnTokens
from kvstrata.layers.raw_window import RawWindow
from kvstrata.layers.sequence import Pair, Prefix, SequenceCache
from kvstrata.layers.tail import FullLayer
from kvstrata.spans import rewrite
from kvstrata.spans.marks import Mark, needs_marks, states_at
from kvstrata.spans.plan import RAW, Plan

Held = OwnTokens | tuple[SealedPart, ...]

# A running sequence is encoded again when so many tokens have come since.
SEAL_TOKENS = 256


class Span:
    def __init__(self, layout: Layout, position: int, num_tokens: int, held: dict[int, Held]) -> None:
        self.layout = layout
        self.position = position  # of its first token
        self.num_tokens = num_tokens  # sealed: a live layer may hold more
        self._held = held  # by flat layer, those with full attention
        self.version = 0  # changes with what it holds
        self.marks: dict[int, Mark] = {}  # by position
        self.ends: set[int] = set()  # where prompts ended: likely places to part from it or go on

    @property
    def end(self) -> int:
        return self.position + self.num_tokens

    @property
    def is_live(self) -> bool:
        return any(isinstance(held, OwnTokens) for held in self._held.values())

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._held)

    @property
    def kv_bytes(self) -> int:
        """Allocated, marks apart; of a live span the whole buffers."""
        return sum(part.nbytes for part in self.sealed_parts()) + self.live_bytes

    @property
    def live_bytes(self) -> int:
        return sum(held.nbytes for held in self._held.values() if isinstance(held, OwnTokens))

    @property
    def owned_bytes(self) -> int:
        """All that is in memory of its own: not the buffers of an owner."""
        return sum(part.nbytes for part in self.sealed_parts()) + self.mark_bytes

    @property
    def mark_bytes(self) -> int:
        return sum(mark.nbytes for mark in self.marks.values())

    @property
    def nbytes(self) -> int:
        return self.kv_bytes + self.mark_bytes

    def pairs(self, layer: int) -> tuple[Pair, ...]:
        """The codecs that a layer is stored under."""
        held = self._held[layer]
        if isinstance(held, OwnTokens):
            return (RAW,)
        return tuple(dict.fromkeys((part.k.codec, part.v.codec) for part in held))

    def parts(self, layer: int, start: int, end: int) -> tuple[Part, ...]:
        """Tokens [start, end), positions in the sequence."""
        held = self._held[layer]
        if isinstance(held, OwnTokens):
            return held.parts(start, end)
        first = held[0].k.position
        return tuple(cut_parts(held, start - first, end - first))

    def held(self, layer: int) -> Held:
        """What a layer holds: the same object until it is replaced."""
        return self._held[layer]

    def rewrite(self, layer: int, pair: Pair, *, upward: bool = False) -> None:
        """Put a layer under a pair of codecs, in memory of its own, trimmed to what is used: `rewrite.next_piece`."""
        progress = rewrite.LayerProgress()
        while self.rewrite_some(layer, pair, progress, upward=upward):
            pass

    def rewrite_some(self, layer: int, pair: Pair, progress: rewrite.LayerProgress, *, upward: bool = False) -> bool:
        """The next small step of it. Readers see what was or what will be, and the layer is whole. Tells whether there
        is more to do; from its beginning, where the span was changed since the last step."""
        if self.num_tokens < 1:
            raise ValueError(f"a span of {self.num_tokens} tokens cannot be stored: seal some first")
        if progress.version != self.version:
            progress.restart(self.version, self.position)
        if pair == RAW and progress.at == self.position and self._adopt_buffer(layer):
            return False
        dtype, grain = self.layout.flat()[layer].dtype, self._grain(layer)
        is_same = True
        while is_same and progress.at < self.end:
            parts = self.parts(layer, progress.at, self.end)
            piece = rewrite.next_piece(parts, progress.at, pair, dtype, grain, upward=upward)
            is_same = piece is parts[0]
            progress.made.append(piece)
            progress.at += piece.num_tokens
            if progress.at % grain.part_tokens == 0 or progress.at == self.end:
                progress.made = grain.join(progress.made)
                self._put(layer, progress)
        return progress.at < self.end

    def _adopt_buffer(self, layer: int) -> bool:
        """Keep a buffer as it is if the span fills it exactly."""
        held = self._held[layer]
        if not isinstance(held, OwnTokens) or (held.start, held.end) != (self.position, self.end):
            return False
        whole = held.whole_arrays()
        if whole is not None:
            self.replace(layer, (rewrite.adopt(*whole, RAW, self.position),))
        return whole is not None

    def _put(self, layer: int, progress: rewrite.LayerProgress) -> None:
        """Put what was made into its place, if it replaces whole parts. A buffer goes when nothing of it is left."""
        held = self._held[layer]
        after: tuple[SealedPart, ...] = ()
        if progress.at < self.end:
            if isinstance(held, OwnTokens) or any(p.k.position < progress.at < p.k.end for p in held):
                return
            after = tuple(part for part in held if part.k.position >= progress.at)
        done = () if isinstance(held, OwnTokens) else held
        before = (part for part in done if self.position < part.k.end <= progress.start)
        self.replace(layer, (*before, *progress.made, *after))
        progress.placed(self.version)

    def _grain(self, layer: int) -> Grain:
        return grain_of(self.layout.flat()[layer])

    def settles(self, layer: int, pair: Pair, *, upward: bool = False) -> bool:
        """Whether a rewrite would leave the layer as it is."""
        held = self._held[layer]
        if isinstance(held, OwnTokens) or sum(part.num_tokens for part in held) != self.num_tokens:
            return False
        dtype, grain = self.layout.flat()[layer].dtype, self._grain(layer)
        if any(grain.may_join(a, b) for a, b in pairwise(held)):
            return False
        return all(_stays(p.k, pair[0], dtype, upward) and _stays(p.v, pair[1], dtype, upward) for p in held)

    @property
    def written_end(self) -> int:
        """Where the owner of a live span is; of others, their end."""
        live = (held.end for held in self._held.values() if isinstance(held, OwnTokens))
        return next(live, self.end)

    def sealing(self, layer: int, pair: Pair, window: RawWindow, *, up_to: int) -> Iterator[None]:
        """Encode what the owner of a live layer had written when it was at `up_to`, but for the window; in small
        steps."""
        held = self._held[layer]
        if not isinstance(held, OwnTokens):
            return
        dtype = self.layout.flat()[layer].dtype
        for part in held.sealed:
            if rewrite.lower_pair(part, pair, dtype) != (part.k.codec, part.v.codec):
                held.replace_sealed(part, rewrite.lowered(part, pair, dtype))
                yield
        since = RawWindow(window.first_tokens, window.recent_tokens + max(0, held.end - up_to))
        if held.num_to_seal(since) >= SEAL_TOKENS:
            yield from held.sealing(*pair, since)

    def sealable_tokens(self, window: RawWindow) -> int:
        """How many of a live span are encoded, or could be."""
        for held in self._held.values():
            if isinstance(held, OwnTokens):
                count = held.num_to_seal(window)
                return held.sealed_tokens + (count if count >= SEAL_TOKENS else 0)
        return 0

    def has_to_seal(self, layer: int, pair: Pair, window: RawWindow) -> bool:
        """Whether a live layer has enough to be encoded, or sealed tokens in more bits than the pair has."""
        held = self._held[layer]
        if not isinstance(held, OwnTokens):
            return False
        dtype = self.layout.flat()[layer].dtype
        return held.num_to_seal(window) >= SEAL_TOKENS or any(
            rewrite.lower_pair(part, pair, dtype) != (part.k.codec, part.v.codec) for part in held.sealed
        )

    def rewrite_marks(self, plan: Plan) -> None:
        for _ in self.rewriting_marks(plan):
            pass

    def rewriting_marks(self, plan: Plan) -> Iterator[None]:
        """One ring at a time. Each is soon done: no ring is longer than its window."""
        for at in list(self.marks):
            for i, (pair, spec) in enumerate(zip(plan.pairs, self.layout.flat(), strict=True)):
                mark = self.marks.get(at)  # it may have gone meanwhile
                ring = mark.states[i] if mark is not None else None
                if mark is not None and isinstance(ring, SealedPart):
                    lowered = rewrite.whole(ring, pair, spec.dtype)
                    if lowered is not ring:
                        self.marks[at] = replace(mark, states=(*mark.states[:i], lowered, *mark.states[i + 1 :]))
                        yield

    def cut(self, start: int, end: int) -> None:
        """Keep only tokens [start, end), positions in the sequence. Memory follows with `shrink`."""
        if not self.position <= start < end <= self.end:
            raise ValueError(f"tokens {start} to {end} cannot be cut out of {self.position} to {self.end}")
        self.position, self.num_tokens = start, end - start
        self.version += 1
        self.marks = {at: mark for at, mark in self.marks.items() if start < at <= end}
        self.ends = {at for at in self.ends if start < at <= end}

    def shrink(self, layer: int) -> None:
        """Give back what a cut left over. No sequence may write a live layer any more: its buffers go with it."""
        if isinstance(self._held[layer], OwnTokens):
            self.rewrite(layer, RAW)
        else:
            self.replace(layer, self._trimmed(layer))

    def append(self, after: Span) -> None:
        """Take over a neighbour's tokens. A layer may then hold several parts, until it is rewritten.

        Nothing is copied but what a cut left untrimmed: parts must follow each other.
        """
        if after.position != self.end or self.is_live or after.is_live:
            raise ValueError(f"a span from {after.position} on cannot be joined to one that ends at {self.end}")
        for layer in self._held:
            self.replace(layer, (*self._trimmed(layer), *after._trimmed(layer)))
        self.num_tokens += after.num_tokens
        self.marks |= after.marks
        self.ends |= after.ends

    def num_parts(self) -> int:
        return max((1 if isinstance(held, OwnTokens) else len(held) for held in self._held.values()), default=1)

    def planes(self, layer: int) -> tuple[SealedPart, ...]:
        """What a sealed layer holds, as it is."""
        held = self._held[layer]
        if isinstance(held, OwnTokens):
            raise ValueError("a live layer has no planes yet")
        return held

    def replace(self, layer: int, parts: Sequence[SealedPart]) -> None:
        self._held[layer] = tuple(parts)
        self.version += 1

    def replace_range(self, layer: int, parts: Sequence[SealedPart], start: int, end: int) -> None:
        """Tokens [start, end) of a sealed layer. What is left of its other parts gets memory of its own."""
        before, after = self.parts(layer, self.position, start), self.parts(layer, end, self.end)
        self._held[layer] = (*map(self._owned, before), *parts, *map(self._owned, after))
        self.version += 1

    def sealed_parts(self) -> Iterator[SealedPart]:
        for held in self._held.values():
            if not isinstance(held, OwnTokens):
                yield from held

    def _trimmed(self, layer: int) -> tuple[SealedPart, ...]:
        return tuple(self._owned(part) for part in self.parts(layer, self.position, self.end))

    def _owned(self, part: Part) -> SealedPart:
        if isinstance(part, SealedPart):
            return part
        return rewrite.cut(part.whole, part.start, part.end)  # pyright: ignore[reportAttributeAccessIssue]


def _stays(planes: Planes, wanted: Codec, dtype: mx.Dtype, upward: bool) -> bool:
    return rewrite.becomes(planes.codec, wanted, planes.dim, dtype, upward=upward) == planes.codec


def empty_span(layout: Layout) -> Span:
    return Span(layout, 0, 0, {})


def live_span(layout: Layout, cache: SequenceCache) -> Span:
    """What a sequence computes itself, nothing of it sealed yet."""
    held: dict[int, Held] = {i: layer.own for i, layer in enumerate(cache.flat) if isinstance(layer, FullLayer)}
    return Span(layout, cache.start, 0, held)


@dataclass(frozen=True)
class SpanRange:
    """Tokens [start, end) of a span, positions in the sequence."""

    span: Span
    start: int
    end: int


class SpanSource:
    """One layer of a range, as a sequence that goes on from it reads it."""

    def __init__(self, run: SpanRange, layer: int) -> None:
        self._run = run
        self._layer = layer
        self._held: object = None
        self._parts: tuple[Part, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self._run.end - self._run.start

    def parts(self) -> tuple[Part, ...]:
        held = self._run.span.held(self._layer)
        if isinstance(held, OwnTokens):
            self._held, self._parts = None, ()
            return held.parts(self._run.start, self._run.end)
        if held is not self._held:
            self._parts = self._run.span.parts(self._layer, self._run.start, self._run.end)
            self._held = held
        return self._parts


def prefix_of(layout: Layout, runs: Sequence[SpanRange], mark: Mark | None) -> Prefix:
    """What a sequence needs to go on after `runs`, which start at 0 and follow each other."""
    num_tokens = runs[-1].end
    if mark is None and needs_marks(layout):
        raise ValueError(f"this model has window or recurrent layers: a resume at {num_tokens} needs a mark")
    specs = layout.flat()
    full = [spec.kind == "full" for spec in specs]
    sources = tuple(tuple(SpanSource(run, i) for run in runs) if full[i] else () for i in range(len(specs)))
    dtype = next((spec.dtype for spec in specs if spec.kind in ("window", "chunked")), mx.float32)
    states = states_at(mark, num_tokens, dtype) if mark is not None else (None,) * len(specs)
    return Prefix(num_tokens, sources, states)
