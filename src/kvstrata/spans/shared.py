"""Tokens of one or more spans as a block that other servers can read: under one precision, whatever they are held in.

What has fewer bits than that is not packed: more bits would bring nothing back, and a block under a name is what its
name says. Knows no tiers and no names.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import groupby

import mlx.core as mx

from kvstrata.attention.parts import CutPart, Part, RawPart, SealedPart
from kvstrata.layers.grain import join
from kvstrata.layers.sequence import Pair
from kvstrata.spans.blocks import Packed, pack_mark, packing_parts
from kvstrata.spans.convert import lowered, owned
from kvstrata.spans.marks import Mark
from kvstrata.spans.plan import Plan
from kvstrata.spans.span import SpanRange


class FewerBits(Exception):
    """What is held has fewer bits than a block should have."""


def packing_shared(runs: Sequence[SpanRange], plan: Plan) -> Generator[None, None, Packed]:
    """Tokens of sealed spans that follow each other, a layer in each step. What is packed is what the spans held at the
    first step. Raises FewerBits."""
    layout = runs[0].span.layout
    found = {
        layer: [part for run in runs for part in run.span.parts(layer, run.start, run.end)]
        for layer in runs[0].span.layers
    }
    made: dict[int, SealedPart] = {}
    for layer, parts in found.items():
        made[layer] = _under(parts, plan.pairs[layer], layout.flat()[layer].dtype)
        mx.eval(made[layer].arrays())
        yield
    return (yield from packing_parts(made))


def pack_shared_mark(mark: Mark, plan: Plan, dtypes: Sequence[mx.Dtype]) -> Packed:
    """Rings under the same precision, states as they are. Raises FewerBits."""
    states = [
        _exactly(lowered(state, pair, dtype), pair) if isinstance(state, SealedPart) else state
        for state, pair, dtype in zip(mark.states, plan.pairs, dtypes, strict=True)
    ]
    return pack_mark(replace(mark, states=tuple(states)))


def _under(parts: Sequence[Part], pair: Pair, dtype: mx.Dtype) -> SealedPart:
    """One part. Raw neighbours are joined before they are encoded, so that a run of 256 tokens has one mean."""
    if any(isinstance(part, RawPart) for part in parts):
        raise ValueError("what its owner still writes cannot be packed")
    sealed = [owned(part) if isinstance(part, CutPart) else part for part in parts]
    joined = [
        part
        for is_raw, group in groupby(sealed, key=lambda part: isinstance(part, SealedPart) and part.is_raw)
        for part in ([join(list(group))] if is_raw else list(group))  # pyright: ignore[reportArgumentType]
    ]
    made = [_exactly(lowered(part, pair, dtype), pair) for part in joined if isinstance(part, SealedPart)]
    if len({(part.k.codec, part.v.codec) for part in made}) > 1:
        raise FewerBits  # of one family and precision, but with other means
    return join(made)


def _exactly(part: SealedPart, pair: Pair) -> SealedPart:
    if (part.k.codec.name, part.v.codec.name) != (pair[0].name, pair[1].name):
        raise FewerBits
    return part
