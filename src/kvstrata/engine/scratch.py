"""What forward passes take beside KV, and how fast prompts are computed: measured before the first request.

Without it a memory limit would be a guess: scratch depends on the model's shapes and on how attention is computed. Some
short chunks run, behind no context and behind long ones that are made of zeros, so that no prompt has to be computed.
Meanwhile MLX starts no operation before the last one has ended, so what is seen is the same at every start. Later it
runs ahead, in whatever memory is free; past the limit that the engine sets (`MemoryShares`) it no longer does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx

from kvstrata.attention.parts import Part, RawPart, SealedPart, Source
from kvstrata.backend.allocator import limits_restored
from kvstrata.codecs import paths
from kvstrata.codecs.raw import RawCodec
from kvstrata.engine.memory import Line, Scratch
from kvstrata.engine.runner import Runner
from kvstrata.engine.scheduler import PassCost
from kvstrata.layers.kinds import LayerSpec, Layout
from kvstrata.layers.recurrent import RecurrentLayer
from kvstrata.layers.sequence import Pair, Prefix, SequenceCache

# Largest prefill chunk: past these sizes a chunk gets no faster by token, only longer.
MAX_CHUNK_CPU = 256
MAX_CHUNK_GPU = 2048
# A chunk of so many weights times tokens is measured whole: that takes a moment.
SOON_DONE = 2e9
# Of others, one part in so many is measured: on a CPU a whole one of a large model takes a minute. Some recurrent
# layers compare all tokens of a chunk with each other, which shows in longer ones.
CHUNK_SHARE = 8
RECURRENT_CHUNK_SHARE = 4
MIN_MEASURED_TOKENS = 16
# The context that is measured: long enough that attention takes about as much as the rest of a layer.
CONTEXT_CPU = 1024
CONTEXT_GPU = 16384
# Parts of it, on Metal: more than one launch decodes.
MANY_PARTS = 7
# Arrays of logits that drawing tokens has alive at once; seen with every sampling option on.
LOGITS_COPIES = 10
# More than what was seen: what is alive in a larger chunk is told from smaller ones.
LEEWAY = 1.2
KEPT_BITS = 5
MAX_TRIES = 8
# Passes that are timed: one, and on a GPU a longer one, or a shorter one where the first took long. Where the longer
# one takes hardly longer, a still longer one tells what a token costs.
TIMED_TOKENS = 64
MANY_TIMED_TOKENS, MOST_TIMED_TOKENS = 512, 2048
HARDLY_LONGER = 1.5
FEW_TIMED_TOKENS = 16
LONG_PASS_S = 0.1
TIMED_PASSES = 4
LOGIT_BYTES = 4

RAW: Pair = (RawCodec(), RawCodec())


@dataclass(frozen=True)
class Shape:
    """What scratch depends on beside the model."""

    rows: int  # of a batch
    vocab_size: int
    max_context_tokens: int  # longer ones are never served, so none is measured
    chunk_tokens: int  # of a prompt
    pairs: tuple[Pair, ...] | None = None  # how stored KV may be encoded, for each layer; None: raw


def max_chunk() -> int:
    return MAX_CHUNK_CPU if mx.default_device() == mx.cpu else MAX_CHUNK_GPU


def measured_context() -> int:
    return CONTEXT_CPU if mx.default_device() == mx.cpu else CONTEXT_GPU


def measure_scratch(runner: Runner, shape: Shape) -> Scratch:
    chunk = shape.chunk_tokens
    tokens = _measured_tokens(runner, chunk)
    measure = _Measure(runner, max(1, min(measured_context(), shape.max_context_tokens - tokens)))
    logits = Line(LOGITS_COPIES * LOGIT_BYTES * shape.rows * shape.vocab_size)
    with _one_by_one():
        return Scratch((logits, *measure.lines(tokens, chunk / tokens, shape.pairs)))


def _measured_tokens(runner: Runner, chunk: int) -> int:
    if runner.num_weights * chunk <= SOON_DONE:
        return chunk
    is_recurrent = any(spec.kind == "recurrent" for spec in runner.layout.flat())
    share = RECURRENT_CHUNK_SHARE if is_recurrent else CHUNK_SHARE
    return min(chunk, max(MIN_MEASURED_TOKENS, chunk // share))


def measure_prefill(runner: Runner, chunk_tokens: int) -> PassCost:
    first = min(chunk_tokens, TIMED_TOKENS)
    first_s = _pass_s(runner, first)
    second = min(chunk_tokens, MANY_TIMED_TOKENS if first_s <= LONG_PASS_S else FEW_TIMED_TOKENS)
    if mx.default_device() == mx.cpu or second == first:
        return PassCost(first / first_s)
    second_s = _pass_s(runner, second)
    most = min(chunk_tokens, MOST_TIMED_TOKENS)
    if first < second < most and second_s <= HARDLY_LONGER * first_s:
        second, second_s = most, _pass_s(runner, most)
    return pass_cost((first, first_s), (second, second_s))


def pass_cost(*timed: tuple[int, float]) -> PassCost:
    """Of two passes: their tokens, and the seconds that they took."""
    (few, few_s), (many, many_s) = sorted(timed)
    token_s = max(many_s - few_s, 0.0) / (many - few)
    pass_tokens = max(0, min(many, int(few_s / max(token_s, 1e-9)) - few))
    return PassCost(many / many_s, pass_tokens, few_s + (pass_tokens - few) * token_s, token_s)


def _pass_s(runner: Runner, tokens: int) -> float:
    """Of those that are not the first of their size, which may load kernels, the fastest; on a CPU there is one."""
    count = 2 if mx.default_device() == mx.cpu else TIMED_PASSES
    _, *seconds = [_peak(partial(runner.prefill, runner.new_cache(tokens), [0] * tokens))[1] for _ in range(count)]
    return min(seconds)


class _Measure:
    def __init__(self, runner: Runner, context: int) -> None:
        self._runner = runner
        self._context = context
        self._layout: Layout = runner.layout
        self._states: tuple[Any, ...] = ()  # of recurrent layers: whatever they are, they have one size

    def lines(self, tokens: int, chunks: float, pairs: Sequence[Pair] | None) -> list[Line]:
        """Of a chunk of `tokens` times `chunks`.

        What grows with the chunk is told from one half as long; what grows with the context is at most what was seen,
        but for the windows that a chunk joins to itself: those have one size.
        """
        specs, half_tokens = self._layout.flat(), max(1, tokens // 2)
        alone = self.chunk_bytes(tokens, 0)
        if any(spec.kind == "foreign" for spec in specs):
            return [self._foreign_line(tokens, chunks)]
        seen, half = self.chunk_bytes(tokens, self._context), self.chunk_bytes(half_tokens, self._context)
        grown = seen + 2 * (chunks - 1) * max(0, seen - half)
        squared = 0.0
        if chunks > 1 and any(spec.kind == "recurrent" for spec in specs):
            squared = 2 * chunks * (chunks - 1) * max(0, alone - 2 * self.chunk_bytes(half_tokens, 0))
        lines = [_line(chunks * alone + squared)]
        token_bytes = max(0.0, grown - self._windows_bytes(self._context)) / self._context
        if pairs is not None:
            sealed = self.chunk_bytes(half_tokens, self._context, pairs)
            token_bytes += max(0, sealed - half) / self._context  # decoding takes the same whatever the chunk
            lines += [_line(0, self._encoding_bytes(pairs)), _line(0, self._step_bytes(pairs), of_all_rows=True)]
        return [*lines, _line(self._windows_bytes() + squared, token_bytes)]

    def _windows_bytes(self, context: int | None = None) -> int:
        """Behind a context of so many tokens; None: of any length."""
        windows = [spec for spec in self._layout.flat() if spec.kind in ("window", "chunked")]
        return sum(spec.token_bytes * min(spec.max_size, context or spec.max_size) for spec in windows)

    def chunk_bytes(self, tokens: int, context: int, pairs: Sequence[Pair] | None = None) -> int:
        """What one chunk behind a context has alive at most beside what stays."""
        return _least(lambda: self._chunk(tokens, context, pairs))

    def _chunk(self, tokens: int, context: int, pairs: Sequence[Pair] | None) -> int:
        prefix = self._prefix(context, pairs) if context else None
        cache = self._runner.new_cache(tokens, prefix)
        alive, _ = _peak(partial(self._runner.prefill, cache, [0] * tokens))
        self._states = self._states or _states(cache)
        return alive

    def _foreign_line(self, tokens: int, chunks: float) -> Line:
        """Caches that only the model knows cannot be filled with zeros: two chunks after each other have to do."""
        cache = self._runner.new_cache(2 * tokens)
        first, _ = _peak(partial(self._runner.prefill, cache, [0] * tokens))
        second, _ = _peak(partial(self._runner.prefill, cache, [0] * tokens))
        return _line(chunks * first, chunks * max(0, second - first) / tokens)

    def _step_bytes(self, pairs: Sequence[Pair]) -> float:
        """Of one decode step, for each token that its row reads."""
        return self.chunk_bytes(1, self._context, pairs) / self._context

    def _encoding_bytes(self, pairs: Sequence[Pair]) -> float:
        """Of work on one layer of a stored span, for each of its tokens: the layer as it was and as it becomes."""
        full = {(spec, pair) for spec, pair in zip(self._layout.flat(), pairs, strict=True) if spec.kind == "full"}
        return max((_least(partial(self._encoded, *layer)) for layer in full), default=0) / self._context

    def _encoded(self, spec: LayerSpec, pair: Pair) -> int:
        k, v = _zeros(spec, self._context)
        mx.eval(k, v)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        _sealed(k, v, pair)
        return mx.get_peak_memory() - before

    def _prefix(self, num_tokens: int, pairs: Sequence[Pair] | None) -> Prefix:
        """Zeros: what a pass takes does not depend on what it reads. Layers of one shape read the same ones."""
        specs = self._layout.flat()
        made: dict[tuple[LayerSpec, Pair], tuple[Source, ...]] = {}
        sources = []
        for spec, pair in zip(specs, pairs or (RAW,) * len(specs), strict=True):
            if spec.kind == "full" and (spec, pair) not in made:
                made[spec, pair] = _sources(spec, pair, num_tokens)
            sources.append(made[spec, pair] if spec.kind == "full" else ())
        states = [_zeros_of_ring(spec, num_tokens, state) for spec, state in zip(specs, self._states, strict=True)]
        return Prefix(num_tokens, tuple(sources), tuple(states))


@dataclass(frozen=True)
class _Others:
    """Tokens of a sequence that runs."""

    part: RawPart
    version: int = 0

    @property
    def num_tokens(self) -> int:
        return self.part.num_tokens

    def parts(self) -> tuple[Part, ...]:
        return (self.part,)


def _sources(spec: LayerSpec, pair: Pair, num_tokens: int) -> tuple[Source, ...]:
    """A context in such parts as take most to be joined. On a GPU those are parts that no single launch decodes: on
    Metal many of them, on CUDA some that another sequence still writes."""
    if paths.active() == "metal":
        return tuple(_sealed(*_zeros(spec, size), pair) for size in _shared_out(num_tokens, MANY_PARTS))
    if paths.active() == "cuda" and num_tokens > 1:
        stored, others = _shared_out(num_tokens, 2)
        k, v = (array[None] for array in _zeros(spec, others))
        mx.eval(k, v)
        return _sealed(*_zeros(spec, stored), pair), _Others(RawPart(k, v, others))
    return (_sealed(*_zeros(spec, num_tokens), pair),)


def _shared_out(num_tokens: int, num_parts: int) -> list[int]:
    bounds = [num_tokens * i // num_parts for i in range(num_parts + 1)]
    return [b - a for a, b in pairwise(bounds) if b > a]


def _line(base_bytes: float, token_bytes: float = 0.0, *, of_all_rows: bool = False) -> Line:
    return Line(int(_rounded_up(base_bytes)), _rounded_up(token_bytes), of_all_rows)


def _rounded_up(seen: float) -> float:
    """With its leeway, to a few binary digits: the same where two starts differ by an array of some kB."""
    fraction, exponent = math.frexp(LEEWAY * seen)
    return math.ldexp(math.ceil(math.ldexp(fraction, KEPT_BITS)), exponent - KEPT_BITS)


def _states(cache: SequenceCache) -> tuple[Any, ...]:
    return tuple(layer.held() if isinstance(layer, RecurrentLayer) else None for layer in cache.flat)


def _zeros(spec: LayerSpec, num_tokens: int) -> tuple[mx.array, mx.array]:
    """K and V, [kv_heads, tokens, dim]"""
    k, v = (mx.zeros((spec.kv_heads, num_tokens, dim), spec.dtype) for dim in (spec.k_dim, spec.v_dim))
    return k, v


def _zeros_of_ring(spec: LayerSpec, num_tokens: int, state: Any) -> Any:
    if spec.kind in ("window", "chunked"):
        return tuple(array[None] for array in _zeros(spec, min(num_tokens, spec.max_size)))
    return state


def _sealed(k: mx.array, v: mx.array, pair: Pair) -> SealedPart:
    k_planes, v_planes = (
        codec.adopt(array, 0) if isinstance(codec, RawCodec) else codec.encode(array, 0)
        for codec, array in zip(pair, (k, v), strict=True)
    )
    part = SealedPart(k_planes, v_planes)
    mx.eval(part.arrays())
    return part


def _least(measure: Callable[[], int]) -> int:
    """The least that was seen twice: now and then MLX starts an operation before it has freed what the last one needed,
    the more often the busier the machine."""
    seen = [measure(), measure()]
    while seen.count(min(seen)) < 2 and len(seen) < MAX_TRIES:
        seen.append(measure())
    return min(seen)


def _peak(action: Any) -> tuple[int, float]:
    """What it had alive at most beside what stays, and its time."""
    mx.synchronize()
    mx.reset_peak_memory()
    began_s = time.perf_counter()
    action()
    mx.synchronize()
    seconds = time.perf_counter() - began_s
    return max(0, mx.get_peak_memory() - mx.get_active_memory()), seconds


@contextmanager
def _one_by_one() -> Iterator[None]:
    """MLX keeps nothing that was freed, and starts no operation before the last one has ended."""
    with limits_restored():
        mx.set_cache_limit(0)
        mx.set_memory_limit(0)
        yield
