"""Helpers of the KV tests: forced tokens through a model, spans made by hand, addresses of arrays."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.registry import parse
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.packing import pack
from kvstrata.kv.precision_plan import make_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import Span, live_span
from kvstrata.models.probe import probe
from kvstrata.prefix_cache.jobs import run_to_end
from kvstrata.tiers.block import BlockContent
from tests.support.models import VOCAB, steady_module

TOLERANCE = 1e-4
NUM_TOKENS = 130


@dataclass(frozen=True)
class Text:
    """A model, forced tokens, and the logits that mlx-lm's own caches give for them in one uninterrupted sequence."""

    model: Any
    layout: Layout
    ids: tuple[int, ...]
    wanted: mx.array  # [tokens, vocab]

    def check(self, logits: mx.array, start: int) -> None:
        """Check logits [tokens, vocab] of the tokens from `start` on."""
        assert distance(logits, self.wanted[start : start + logits.shape[0]]) <= TOLERANCE

    def advance(self, cache: SequenceCache, end: int) -> None:
        """Run one pass over all tokens up to `end`, and check its logits."""
        start = cache.num_tokens
        self.check(forward(self.model, cache, self.ids[start:end]), start)


@functools.cache
def text_for(architecture: str, num_tokens: int = NUM_TOKENS, **overrides: Any) -> Text:
    model = steady_module(architecture, **overrides)
    rng = random.Random(architecture)
    ids = tuple(rng.randrange(VOCAB) for _ in range(num_tokens))
    cache = make_prompt_cache(model)
    rows = [model(mx.array([ids[i : i + 50]]), cache=cache)[0] for i in range(0, num_tokens, 50)]
    wanted = mx.concatenate(rows)
    mx.eval(wanted)
    return Text(model, probe(model), ids, wanted)


def forward(model: Any, cache: SequenceCache, tokens: Sequence[int]) -> mx.array:
    """Return logits [tokens, vocab] of one pass."""
    logits = model(mx.array([tokens]), cache=cache.caches())[0]
    cache.end_pass(len(tokens))
    mx.eval(logits, cache.arrays())
    return logits


def distance(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


# One layer alone.

HEADS, DIM = 2, 64
TOKEN_BYTES = 2 * HEADS * DIM * 4
LAYOUT = Layout((LayerSpec("full", kv_heads=HEADS, k_dim=DIM, v_dim=DIM),))


def random_kv(num_tokens: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    k, v = mx.random.split(mx.random.key(seed))
    shape = (1, HEADS, num_tokens, DIM)
    return mx.random.normal(shape, key=k), mx.random.normal(shape, key=v)


def filled_layer(num_tokens: int, capacity: int, seed: int = 0) -> FullLayer:
    layer = FullLayer(capacity)
    layer.append(*random_kv(num_tokens, seed))
    mx.eval(layer.arrays())
    return layer


def live_span_of(layer: FullLayer) -> Span:
    """Return a live span over all tokens of a layer."""
    return Span(LAYOUT, layer.own.start, layer.own.end - layer.own.start, {0: layer.own})


def sealed_span(layout: Layout, cache: SequenceCache) -> Span:
    """Return a live span over all tokens that a sequence has computed, committed."""
    span = live_span(layout, cache)
    span.num_tokens = cache.num_tokens - cache.start
    return span


def packed(span: Span, start: int, end: int) -> BlockContent:
    return run_to_end(pack(span, start, end))


def random_span(num_tokens: int, name: str = "raw", *, position: int = 0, seed: int = 0) -> Span:
    """Return a sealed span of one layer with random values."""
    k, v = (array[0] for array in random_kv(num_tokens, seed))
    codecs = make_plan(LAYOUT, parse(name), parse(name)).pairs[0]
    segment = SealedSegment(codecs[0].encode(k, position), codecs[1].encode(v, position))
    return Span(LAYOUT, position, num_tokens, {0: (segment,)})


def address(array: mx.array) -> int:
    mx.eval(array)
    return np.asarray(array).ctypes.data
